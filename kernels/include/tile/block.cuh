#pragma once
// Sums and maxima over a block, through one value per warp in shared memory.

#include <tile/warp_max.cuh>

// Reduces the values of a block's warps, which are the same in all lanes of a warp. `partial` may
// be used again at once.
template <class T, int warps, class Combine>
__device__ __forceinline__ T reduce_warps(T value, T (&partial)[warps], Combine combine) {
  __syncthreads();  // before the last reduction's partial values are overwritten
  if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = value;
  __syncthreads();  // every warp's value is written
  value = partial[0];
  for (int warp = 1; warp < warps; ++warp) value = combine(value, partial[warp]);
  return value;
}

// Every thread gets the sum, or the maximum, of all threads' values.
template <class T, int warps>
__device__ __forceinline__ T block_sum(T value, T (&partial)[warps]) {
  return reduce_warps(warp_sum(value), partial, [](T a, T b) { return a + b; });
}
template <class T, int warps>
__device__ __forceinline__ T block_max(T value, T (&partial)[warps]) {
  return reduce_warps(warp_max(value), partial, [](T a, T b) { return fmax(a, b); });
}
