#pragma once
// Barriers in shared memory. A phase completes when `arrivals` threads have arrived and all
// expected bytes have been copied. Phases alternate between 0 and 1.
//
// The simulator copies bytes as late as a device may: in a wait. It reports a wait that never ends.
#include <simulator.h>
#include <timeline.cuh>

struct Barrier {
  unsigned long long state;
};

inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Initialises a barrier; one thread calls this.
inline void init_barrier(Barrier& barrier, int arrivals, simulator::Here here = {}) {
  simulator_make_barrier(&barrier, arrivals, here.file, here.line);
}

// Makes initialised barriers visible to TMA; __syncthreads makes them visible to threads.
inline void fence_barrier_init() {
  simulator_publish_barriers();
}

inline void arrive(Barrier& barrier, simulator::Here here = {}) {
  timeline::event(timeline::barrier_arrive, shared_address(&barrier));
  simulator_arrive(&barrier, 0, "arrive", here.file, here.line);
}

// Arrives and adds `bytes` to the bytes that the phase expects.
inline void arrive_expect_tx(Barrier& barrier, int bytes, simulator::Here here = {}) {
  timeline::event(timeline::barrier_arrive, shared_address(&barrier), bytes);
  simulator_arrive(&barrier, bytes, "arrive_expect_tx", here.file, here.line);
}

// Waits for the end of a phase; on a new barrier, phase 1 has ended.
inline void wait(Barrier& barrier, int phase, simulator::Here here = {}) {
  const timeline::Phase waiting(timeline::barrier_wait, shared_address(&barrier));
  simulator_wait(&barrier, phase, here.file, here.line);
}
