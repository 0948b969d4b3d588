#pragma once
// The thread's lane, from which the compiler precomputes nothing.

#include <ptx/opaque.cuh>
#include <tile/warp.cuh>

__device__ __forceinline__ int own_lane() {
  return opaque(int(threadIdx.x)) % warp_size;
}
