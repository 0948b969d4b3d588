#pragma once
// wgmma accumulators in memory, in register order.

#include <ptx/opaque.cuh>
#include <tile/warp.cuh>

// 64 accumulator rows in a warpgroup's register order: for every 8 columns, four floats per thread,
// from two rows and two columns. A thread reads back only its own values, so nothing is reordered.
template <int columns>
struct RegisterTile {
  static constexpr int width = columns;
  float4 fours[columns / 8][warpgroup_size];

  // Writes the registers from x[first] on, as far as there are any.
  template <int count>
  __device__ __forceinline__ void write(const float (&x)[count], int first = 0) {
    const int own = opaque(int(threadIdx.x)) % warpgroup_size;
#pragma unroll
    for (int i = 0; i < columns / 8 && first + 4 * i < count; ++i) {
      const float* four = &x[first + 4 * i];
      fours[i][own] = float4{four[0], four[1], four[2], four[3]};
    }
  }

  __device__ __forceinline__ void read(float (&x)[columns / 2]) const {
    const int own = opaque(int(threadIdx.x)) % warpgroup_size;
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
      const float4 four = fours[i][own];
      x[4 * i] = four.x, x[4 * i + 1] = four.y;
      x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  }
};
