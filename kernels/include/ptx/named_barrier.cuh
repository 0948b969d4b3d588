#pragma once
// The block's sixteen barriers. Barrier 0 is that of __syncthreads; `threads` counts whole warps.

// Waits until `threads` threads have arrived at the barrier.  bar.sync
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting: what this thread wrote is seen by those that wait.  bar.arrive
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
