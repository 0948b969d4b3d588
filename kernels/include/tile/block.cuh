#pragma once
// Sums and maxima over a block, through one value per warp in shared memory.

#include <tile/warp.cuh>

constexpr int warps = (threads + warp_size - 1) / warp_size;
static_assert(threads % warp_size == 0, "shuffles need whole warps");

// Every thread gets the sum of all threads' values. `partial` may be used again at once.
template <class T>
__device__ __forceinline__ T block_sum(T value, T (&partial)[warps]) {
  value = warp_sum(value);
  __syncthreads();  // before the last reduction's partial values are overwritten
  if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = value;
  __syncthreads();  // every warp's value is there
  value = partial[0];
  for (int warp = 1; warp < warps; ++warp) value += partial[warp];
  return value;
}

// The same for the maximum.
template <class T>
__device__ __forceinline__ T block_max(T value, T (&partial)[warps]) {
  value = warp_max(value);
  __syncthreads();  // before the last reduction's partial values are overwritten
  if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = value;
  __syncthreads();  // every warp's value is there
  value = partial[0];
  for (int warp = 1; warp < warps; ++warp) value = fmax(value, partial[warp]);
  return value;
}
