#pragma once
// Memory layout of the dQ accumulators. It depends on how two warpgroups split dQ = dS K
// for a tile of Br rows. Each part of the split is a RegisterTile with `width` columns.

#include <tile/math.cuh>

template <int Br, int d, int dv>
struct QueryLayout {
  // With more than 128 columns, dK and dV of 64 keys need the registers of two warpgroups.
  static constexpr bool is_wide = d > 128 || dv > 128;
  // dQ is divided by rows, by boxes of 64 columns, or by keys. If it is divided by keys, both
  // warpgroups add to the same part.
  static constexpr bool by_rows = !is_wide && Br == 128;
  static constexpr bool by_columns = is_wide || (!by_rows && d > 64);
  static constexpr int count = by_rows ? 2 : by_columns ? cdiv(d, 64) : 1;
  static constexpr int width = by_columns ? 64 : cdiv(d, 16) * 16;
  static_assert(by_rows || Br == 64, "a tile has 64 or 128 rows");
};
