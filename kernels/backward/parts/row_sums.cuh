#pragma once
// lse and delta of all rows, grouped by tile, so that one copy loads the statistics of a tile.

#include <backward/parts/row_tile_number.cuh>
#include <backward/parts/row_stats.cuh>

// RowStats of a tile's Br rows. Rows outside the array are stored like rows that see no key.
template <int Br>
struct RowSums {
  alignas(16) float lse2[Br], delta[Br];
};

// Reads lse and delta of any row of one batch element, for repairs.
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
