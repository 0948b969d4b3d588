#pragma once
// The named barriers of a block, 0 to 15; __syncthreads uses 0. `threads` is a multiple of 32.
#include <timeline.cuh>

// Arrives and waits until `threads` threads have arrived at the barrier.  PTX: bar.sync
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  const timeline::Phase waiting(timeline::named_wait, id, threads);
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting; threads that wait see this thread's earlier writes.  PTX: bar.arrive
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  timeline::event(timeline::named_arrive, id, threads);
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
