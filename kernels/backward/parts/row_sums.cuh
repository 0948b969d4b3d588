#pragma once
// lse and delta of all rows, tile by tile, so that one copy takes those of a tile to shared memory.

#include <backward/parts/row_tile_number.cuh>
#include <backward/parts/row_stats.cuh>

// RowStats of the Br rows of a tile; rows outside the array have those of a row that sees no key.
template <int Br>
struct RowSums {
  alignas(16) float lse2[Br], delta[Br];
};

// lse and delta of any row of a batch element, for repairs.
template <int Br>
struct StatsOfTiles {
  const RowSums<Br>* tiles;
  TilesOfRows<Br> number;
  Tensor<const real> lse;
  int batch;

  __device__ RawStats operator()(int head, int row) const {
    return {*lse.row(batch, head, row), tiles[number(head, row)].delta[row % Br]};
  }
};
