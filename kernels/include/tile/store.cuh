#pragma once
// Stores rows from fragments. Of every 8 columns, lane l of a quad holds columns 2 * (l % 4) and 2
// * (l % 4) + 1. Quads exchange pairs of 16-bit numbers, so that each lane stores 16 bytes at once.

#include <ptx/pack.cuh>
#include <tile/math.cuh>
#include <tile/warp.cuh>

// Exchanges values between two lanes. The lower lane keeps `first` and receives the other's `first`
// as `second`; the upper lane keeps `second` and receives the other's `second` as `first`.
__device__ __forceinline__ void trade(unsigned& first, unsigned& second, int lane, int distance) {
  const bool upper = lane & distance;
  const unsigned other = __shfl_xor_sync(full_warp, upper ? first : second, distance);
  (upper ? first : second) = other;
}

// Transposes a quad: lane l receives the l-th word of each of its four lanes.
__device__ __forceinline__ uint4 transpose_quad(uint4 x, int lane) {
  trade(x.x, x.y, lane, 1);
  trade(x.z, x.w, lane, 1);
  trade(x.x, x.z, lane, 2);
  trade(x.y, x.w, lane, 2);
  return x;
}

// Converts two floats for store_row(): packed as T if it has 16 bits, else unchanged.
template <class T>
__device__ __forceinline__ auto stored_pair(float low, float high) {
  if constexpr (sizeof(T) == sizeof(float))
    return float2{low, high};
  else
    return pack<T>(low, high);
}

// Stores a row's numbers from column `first_col` up to `end`, a multiple of 8, and `cols`.
// `aligned`: rows start at multiples of 16 bytes. All lanes call this, also for rows outside the
// tensor.
template <int cols, class T, class Pair, int count>
__device__ __forceinline__ void store_row(T* row, const Pair (&pairs)[count], int first_col,
                                          bool aligned, bool inside, int lane, int end = cols) {
  end = min(cols, end);
  if (cols % 8 == 0 && aligned) {
    if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int col = first_col + i * 8 + 2 * (lane % 4);
        if (inside && col < end) *reinterpret_cast<Pair*>(row + col) = pairs[i];
      }
    } else {
#pragma unroll
      for (int n = 0; n < count; n += 4) {
        const auto pair = [&](int i) { return n + i < count ? pairs[n + i] : 0; };
        const uint4 piece = transpose_quad({pair(0), pair(1), pair(2), pair(3)}, lane);
        const int own = n + lane % 4, col = first_col + own * 8;
        if (inside && own < count && col < end) *reinterpret_cast<uint4*>(row + col) = piece;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2 * count; ++i) {
      const int col = first_col + i / 2 * 8 + 2 * (lane % 4) + i % 2;
      if (inside && col < end) row[col] = reinterpret_cast<const T*>(&pairs[i / 2])[i % 2];
    }
  }
}
