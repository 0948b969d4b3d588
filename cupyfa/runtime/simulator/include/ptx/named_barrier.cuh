#pragma once
// The named barriers of a block, 0 to 15; __syncthreads uses 0. `threads` is a multiple of 32.
#include <simulator.h>
#include <timeline.cuh>

// Arrives and waits until `threads` threads have arrived at the barrier.
inline void barrier_sync(int id, int threads, simulator::Here here = {}) {
  const timeline::Phase waiting(timeline::named_wait, id, threads);
  simulator::barrier(id, threads, true, "barrier_sync", here);
}

// Arrives without waiting; threads that wait see this thread's earlier writes.
inline void barrier_arrive(int id, int threads, simulator::Here here = {}) {
  timeline::event(timeline::named_arrive, id, threads);
  simulator::barrier(id, threads, false, "barrier_arrive", here);
}
