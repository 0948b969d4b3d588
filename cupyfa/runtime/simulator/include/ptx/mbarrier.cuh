#pragma once
// Barriers in shared memory. A phase completes when `arrivals` threads have arrived and all
// expected bytes were copied. Phases are numbered 0 1 0 1 …; a wait names one of them.
//
// Bytes arrive as late as a device allows: in a wait. A wait that never ends is a fault.
#include <simulator.h>
#include <timeline.cuh>

struct Barrier {
  unsigned long long state;
};

inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// One thread calls this.
inline void init_barrier(Barrier& barrier, int arrivals, simulator::Here here = {}) {
  simulator_make_barrier(&barrier, arrivals, here.file, here.line);
}

// Makes initialised barriers visible to copies; __syncthreads does so for threads.
inline void fence_barrier_init() {
  simulator_publish_barriers();
}

inline void arrive(Barrier& barrier, simulator::Here here = {}) {
  timeline::event(timeline::barrier_arrive, shared_address(&barrier));
  simulator_arrive(&barrier, 0, "arrive", here.file, here.line);
}

// Arrives, and adds `bytes` to the bytes that the phase expects.
inline void arrive_expect_tx(Barrier& barrier, int bytes, simulator::Here here = {}) {
  timeline::event(timeline::barrier_arrive, shared_address(&barrier), bytes);
  simulator_arrive(&barrier, bytes, "arrive_expect_tx", here.file, here.line);
}

// Waits until a phase is complete; a new barrier has completed phase 1.
inline void wait(Barrier& barrier, int phase, simulator::Here here = {}) {
  const timeline::Phase waiting(timeline::barrier_wait, shared_address(&barrier));
  simulator_wait(&barrier, phase, here.file, here.line);
}
