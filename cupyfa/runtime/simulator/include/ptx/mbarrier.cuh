#pragma once
// Barriers in shared memory that count threads and bytes. A barrier goes through phases, 0 1 0 1 …:
// one ends when as many threads have arrived as it was made for and all expected bytes have come.
// A thread that waits names the phase, so it must count its waits.
//
// Bytes come as late as a device may let them: in a wait. A wait that nothing ends is a fault.
#include <simulator.h>

struct Barrier {
  unsigned long long state;
};

inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Makes a barrier with this number of arrivals a phase; one thread does it.
inline void init_barrier(Barrier& barrier, int arrivals, simulator::Here here = {}) {
  simulator_make_barrier(&barrier, arrivals, here.file, here.line);
}

// Lets copies see the barriers that this thread has made; a __syncthreads does so for threads.
inline void fence_barrier_init() {
  simulator_publish_barriers();
}

inline void arrive(Barrier& barrier, simulator::Here here = {}) {
  simulator_arrive(&barrier, 0, "arrive", here.file, here.line);
}

// Arrives, and lets the phase wait for this number of bytes of copies.
inline void arrive_expect_tx(Barrier& barrier, int bytes, simulator::Here here = {}) {
  simulator_arrive(&barrier, bytes, "arrive_expect_tx", here.file, here.line);
}

// Waits until the phase, 0 or 1, has ended. Of a new barrier phase 1 counts as ended.
inline void wait(Barrier& barrier, int phase, simulator::Here here = {}) {
  simulator_wait(&barrier, phase, here.file, here.line);
}
