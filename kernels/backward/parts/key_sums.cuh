#pragma once
// Sums of dK and dV over the blocks that share a key tile. Each block adds its parts by TMA
// reduce-add; the last one of a tile reads the sums back and stores the gradients.

#include <backward/parts/gradient_warpgroups.cuh>
#include <backward/parts/register_tile.cuh>

// Sums of a warpgroup's 64 keys: RegisterTiles of dK, then of dV.
template <int width, int depth, int depth_of_V>
struct KeySums {
  static constexpr int parts_of_K = cdiv(depth, width);
  static constexpr int count = parts_of_K + cdiv(depth_of_V, width);
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
