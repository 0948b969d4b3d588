#pragma once
// Block-wide sums and maxima, through one value per warp in shared memory.

#include <tile/warp_max.cuh>

// Combines one value per warp, equal in all lanes, into one per block. `partial` may be reused.
template <class T, int warps, class Combine>
__device__ __forceinline__ T reduce_warps(T value, T (&partial)[warps], Combine combine) {
  __syncthreads();  // the previous reduction has read its partial values
  if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = value;
  __syncthreads();  // every warp's value is written
  value = partial[0];
  for (int warp = 1; warp < warps; ++warp) value = combine(value, partial[warp]);
  return value;
}

// Returns the sum, or the maximum, of all threads' values in every thread.
template <class T, int warps>
__device__ __forceinline__ T block_sum(T value, T (&partial)[warps]) {
  return reduce_warps(warp_sum(value), partial, [](T a, T b) { return a + b; });
}
template <class T, int warps>
__device__ __forceinline__ T block_max(T value, T (&partial)[warps]) {
  return reduce_warps(warp_max(value), partial, [](T a, T b) { return fmax(a, b); });
}
