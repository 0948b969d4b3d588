#pragma once
// Sums of dK and dV of 64 keys in global memory, where several blocks add to them.

#include <backward/parts/register_tile.cuh>

// RegisterTiles of dK, then of dV.
template <int width, int d, int dv>
struct KeySums {
  static constexpr int parts_of_K = cdiv(d, width), count = parts_of_K + cdiv(dv, width);
  RegisterTile<width> parts[count];

  // Reads dK or dV. Other blocks wrote them, so the reads bypass L1.
  template <bool of_V, int registers>
  __device__ __forceinline__ void read(float (&sums)[registers]) const {
    const int own = opaque(int(threadIdx.x)) % warpgroup_size, first = of_V ? parts_of_K : 0;
#pragma unroll
    for (int i = 0; i < registers / 4; ++i) {
      const float4 four = __ldcg(&parts[first + i / (width / 8)].fours[i % (width / 8)][own]);
      sums[4 * i] = four.x, sums[4 * i + 1] = four.y;
      sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
    }
  }
};
