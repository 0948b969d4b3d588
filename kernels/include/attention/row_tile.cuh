#pragma once
// A Q tile of one head, and the range of keys that its rows see. kv_begin is rounded down to the
// start of a K/V tile; after() returns the start of the next one.

#include <attention/extent.cuh>

struct RowTile : KeyTiles, Origin {
  int row, head, batch, kv_begin, kv_end;
};

template <int rows, int keys>
__device__ __forceinline__ RowTile row_tile(const Extent& extent, int row, int head, int batch) {
  const auto map = extent.key_tiles(row / rows);
  return {map,
          extent,  // sliced to its Origin
          row,
          head,
          batch,
          map.template from<keys>(extent.kv_begin(row) / keys * keys),
          extent.kv_end(min(row + rows, extent.M) - 1)};
}
