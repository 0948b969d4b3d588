#pragma once
// Results of wgmma in memory, in the order of registers.

#include <ptx/opaque.cuh>
#include <tile/warp.cuh>

// 64 rows of a product in the order of a warpgroup's registers: for each 8 columns, four floats of
// each thread, of two rows and two columns. A thread reads only its values: nothing is sorted.
template <int columns>
struct RegisterTile {
  float4 fours[columns / 8][warpgroup_size];

  // Writes registers from number `first` on.
  template <int count>
  __device__ __forceinline__ void write(const float (&x)[count], int first = 0) {
    const int own = opaque(int(threadIdx.x)) % warpgroup_size;
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
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
