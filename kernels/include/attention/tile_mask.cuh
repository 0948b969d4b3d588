#pragma once
// Returns whether the causal mask, a window or the end of the keys hides a pair of these rows and
// keys. (The last row decides at the left edge of a window, the first row at the right edge.)

#include <attention/extent.cuh>

__device__ __forceinline__ bool is_masked(const Extent& extent, int first_row, int rows,
                                          int first_key, int keys) {
  if constexpr (!windowed) return first_key + keys > extent.kv_end(first_row);
  return first_key + keys > extent.kv_end(first_row) ||
         first_key < extent.kv_begin(min(first_row + rows, extent.M) - 1);
}
