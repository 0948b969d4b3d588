#pragma once
// The keys of a tile that are visible to one row.

#include <attention/extent.cuh>

// The keys of a tile that causal mask and window leave visible to a row: `first` … `end` - 1 within
// the tile; none for rows past the end. shows() also evaluates a mask expression.
struct Seen {
  Extent extent;
  int row, first_key, first, end;

  __device__ __forceinline__ bool shows(int key) const {
    return extent.shown(row, first_key + key);
  }
  __device__ __forceinline__ real dropped(real p, int key) const {
    return extent.dropped(p, row, first_key + key);
  }
};

__device__ __forceinline__ Seen seen_in_tile(const Extent& extent, int row, int first_key,
                                             int keys) {
  const int first = windowed ? max(0, extent.kv_begin(row) - first_key) : 0;
  const int end = row < extent.M ? max(0, min(keys, extent.kv_end(row) - first_key)) : 0;
  return {extent, row, first_key, first, end};
}
