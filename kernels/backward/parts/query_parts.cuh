#pragma once
// Sums of dQ in memory: how two warpgroups divide dQ = dS K of a tile of Br rows, and how a part
// lies there.

#include <ptx/opaque.cuh>
#include <tile/math.cuh>
#include <tile/warp.cuh>

template <int Br, int d, int dv>
struct QueryParts {
  // dK and dV of 64 keys and more than 128 columns need the registers of two warpgroups.
  static constexpr bool is_wide = d > 128 || dv > 128;
  // dQ is divided by rows, or by columns in boxes of 64, or else by keys: then both warpgroups add
  // to the same part.
  static constexpr bool by_rows = !is_wide && Br == 128;
  static constexpr bool by_columns = is_wide || (!by_rows && d > 64);
  static constexpr int count = by_rows ? 2 : by_columns ? cdiv(d, 64) : 1;
  static constexpr int width = by_columns ? 64 : cdiv(d, 16) * 16;
  static_assert(by_rows || Br == 64, "a tile has the rows of one warpgroup, or of two");
};

// 64 rows of a product as the registers of a warpgroup hold them: four floats, of two rows and two
// columns, for each thread, and so on. Thread i reads what thread i wrote: nothing is sorted.
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
