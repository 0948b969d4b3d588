#pragma once
// lse and delta of all rows, tile by tile: a tile's are copied to shared memory at once.

#include <backward/parts/row_stats.cuh>

// RowStats of the Br rows of a tile; of rows outside the array those of a row that sees no key.
template <int Br>
struct RowSums {
  alignas(16) float lse2[Br], delta[Br];
};

// The number of a row's tile.
template <int Br>
__device__ __forceinline__ long long tile_of(int batch, int head, int heads, int row, int M) {
  return ((long long)batch * heads + head) * cdiv(M, Br) + row / Br;
}

// The RowStats of any row, for repairs.
template <int Br>
struct StatsOfTiles {
  const RowSums<Br>* tiles;
  int batch, heads, M;

  __device__ RowStats operator()(int head, int row) const {
    const RowSums<Br>& tile = tiles[tile_of<Br>(batch, head, heads, row, M)];
    return {tile.lse2[row % Br], tile.delta[row % Br]};
  }
};
