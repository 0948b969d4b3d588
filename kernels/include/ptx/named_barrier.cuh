#pragma once
// The block's sixteen barriers. Barrier 0 is that of __syncthreads; `threads` counts whole warps.
#include <timeline.cuh>

// Waits until `threads` threads have arrived at the barrier.  bar.sync
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  const timeline::Phase waiting(timeline::named_wait, id, threads);
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting: threads that wait see what this thread wrote.  bar.arrive
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  timeline::event(timeline::named_arrive, id, threads);
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
