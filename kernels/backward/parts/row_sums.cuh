#pragma once
// What the launches of wgmma_columns.cu share: lse and delta of a tile of rows, and how two
// warpgroups sum dQ of a tile in memory.

#include <backward/parts/repair_gradients.cuh>
#include <tile/math.cuh>
#include <ptx/pack.cuh>
#include <ptx/tma.cuh>

constexpr int consumers = 2;        // warpgroups that own 64 keys each, or share them
constexpr int warpgroup_rows = 64;  // of one's products

// Columns of Q, K and of dO, V, filled up to whole products.
constexpr int d_width = cdiv(d, step) * step;
constexpr int dv_width = cdiv(dv, step) * step;

// Of a tile's rows: lse in powers of two, and delta. Rows that see no key, or lie outside the
// array, have infinity and 0, which make their P 0.
struct RowSums {
  alignas(16) float lse2[Br], delta[Br];
};

// The number of a row's tile.
__device__ __forceinline__ long long tile_of(int batch, int head, int heads, int row, int M) {
  return ((long long)batch * heads + head) * cdiv(M, Br) + row / Br;
}

// The RowStats of any row, for repairs.
struct StatsOfTiles {
  const RowSums* tiles;
  int batch, heads, M;

  __device__ RowStats operator()(int head, int row) const {
    const RowSums& tile = tiles[tile_of(batch, head, heads, row, M)];
    return {tile.lse2[row % Br], tile.delta[row % Br]};
  }
};

// With more columns than two boxes hold, a warpgroup lacks registers for dK and dV of 64 keys: two
// share them (shared_keys.cuh).
constexpr bool is_wide = d > 2 * box_columns || dv > 2 * box_columns;
static_assert(d <= 4 * box_columns && dv <= 4 * box_columns, "sums stay in registers");

// dQ = dS K of a tile is divided among the warpgroups by rows, or by columns in boxes, or else by
// keys; then both add to the same part.
constexpr bool by_rows_of_dQ = !is_wide && Br == consumers * warpgroup_rows;
constexpr bool by_columns_of_dQ = is_wide || (!by_rows_of_dQ && d > box_columns);
static_assert(by_rows_of_dQ || Br == warpgroup_rows, "a tile has a warpgroup's rows, or two's");
constexpr int parts = by_rows_of_dQ ? consumers : by_columns_of_dQ ? cdiv(d, box_columns) : 1;
constexpr int part_width = by_columns_of_dQ ? box_columns : d_width;

// The sums lie as the registers of a product do, so that they are sorted only once, when finished:
// four of them, of two columns and two rows, for each thread of a warpgroup, and so on.
struct Part {
  float4 sums[part_width / 8][4 * 32];
};
