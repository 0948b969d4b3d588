#pragma once
// Says whether causal masks, windows or the end of the keys hide a part of a tile.

#include <attention/extent.cuh>

// Whether a pair of these rows and keys is out of reach, or a tile of keys reaches past the end.
// (The last row decides at the left end of a window, the first one at the right end.)
__device__ __forceinline__ bool is_masked(const Extent& extent, int first_row, int rows,
                                          int first_key, int keys) {
  if constexpr (!windowed) return first_key + keys > extent.kv_end(first_row);
  return first_key + keys > extent.kv_end(first_row) ||
         first_key < extent.kv_begin(min(first_row + rows, extent.M) - 1);
}
