#pragma once
// Returns the maximum over a warp in every lane.

#include <tile/warp.cuh>

template <class T>
__device__ __forceinline__ T warp_max(T value) {
  for (int distance = warp_size / 2; distance > 0; distance /= 2)
    value = fmax(value, __shfl_xor_sync(full_warp, value, distance));
  return value;
}
