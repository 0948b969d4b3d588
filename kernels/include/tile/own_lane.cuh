#pragma once
// Returns the thread's lane, hidden from the optimiser (opaque.cuh) so that nothing is precomputed.

#include <ptx/opaque.cuh>
#include <tile/warp.cuh>

__device__ __forceinline__ int own_lane() {
  return opaque(int(threadIdx.x)) % warp_size;
}
