#pragma once
// A row tile and a key tile, as the backward kernels visit them.

#include <attention/extent.cuh>

template <int rows, int keys>
struct TilePair {
  Extent extent;
  int first_row, first_key;

  // Return the index of a row or key for expressions.
  template <bool at_end = true>
  __device__ __forceinline__ Index row(int row, int more = 0) const {
    return index_of<at_end>(first_row + row, more, extent.M);
  }
  template <bool at_end>
  __device__ __forceinline__ Index key(int key, int more) const {
    return index_of<at_end>(first_key + key, more, extent.N);
  }

  __device__ __forceinline__ bool in_reach(int row, int key) const {
    return extent.in_reach(first_row + row, first_key + key);
  }

  // Returns whether neither tile reaches past the last row or key.
  __device__ __forceinline__ bool is_whole() const {
    return first_row + rows <= extent.M && first_key + keys <= extent.N;
  }

  // Returns whether the block mask is known to leave all pairs visible.
  __device__ __forceinline__ bool is_full() const {
    if constexpr (has_row_tiles)
      return extent.row_tiles(first_key / keys).template is_full<rows>(first_row);
    else
      return extent.key_tiles(first_row / rows).template is_full<keys>(first_key);
  }
  // Returns whether existing rows see all existing keys, regardless of mask expressions.
  __device__ __forceinline__ bool reaches_all() const {
    if constexpr (!causal && !windowed) return true;
    const int last_row = min(first_row + rows, extent.M) - 1;
    return extent.kv_end(first_row) >= min(first_key + keys, extent.N) &&
           extent.kv_begin(last_row) <= first_key;
  }
};
