#pragma once
// lse and delta of all rows, tile by tile: a tile's are copied to shared memory at once.

#include <attention/batch.cuh>
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

// The numbers of the tiles of a batch element.
template <int Br>
struct TilesOfRows {
  int batch, heads, M;  // if packed: the sequence's first number, and the numbers of a head

  __device__ __forceinline__ long long operator()(int head, int row) const {
    if constexpr (packed) return (long long)head * M + batch + row / Br;
    return tile_of<Br>(batch, head, heads, row, M);
  }
};
template <int Br, class Arrays>
__device__ __forceinline__ TilesOfRows<Br> tiles_of([[maybe_unused]] const Arrays& mods, int batch,
                                                    int heads, int M) {
  if constexpr (packed)
    return {int(tile_of_rows<Br>(Sizes{M}, mods, batch, 0, heads, 0)), heads,
            tiles_of_rows<Br>(Sizes{M}, mods)};
  else
    return {batch, heads, M};
}

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
