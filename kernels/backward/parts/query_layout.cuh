#pragma once
// Memory layout of the dQ accumulators, determined by how two warpgroups split the product
// dQ = dS K for a tile of Br rows. dQ consists of `count` RegisterTiles of `width` columns.

#include <tile/math.cuh>

template <int Br, int d, int dv>
struct QueryLayout {
  // With more than 128 columns, dK and dV of 64 keys need the registers of two warpgroups.
  static constexpr bool is_wide = d > 128 || dv > 128;
  // dQ is split by rows, by blocks of 64 columns, or by keys. If dQ is split by keys, both
  // warpgroups add to the same RegisterTile.
  static constexpr bool by_rows = !is_wide && Br == 128;
  static constexpr bool by_columns = is_wide || (!by_rows && d > 64);
  static constexpr int count = by_rows ? 2 : by_columns ? cdiv(d, 64) : 1;
  static constexpr int width = by_columns ? 64 : cdiv(d, 16) * 16;
  static_assert(by_rows || Br == 64, "a tile has 64 or 128 rows");
};
