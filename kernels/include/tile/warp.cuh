#pragma once
// Warp size, and a warp-wide sum that every lane receives.

constexpr unsigned full_warp = 0xffffffffu;
constexpr int warp_size = 32;
constexpr int warpgroup_size = 128;  // four warps, the first at a multiple of 4

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(full_warp, value, distance);
  }
  return value;
}
