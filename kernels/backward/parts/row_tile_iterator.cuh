#pragma once
// Iterates over the row tiles that see some key of a block's key tile.

#include <attention/extent.cuh>
#include <backward/parts/row_range.cuh>

// Visits the row tiles of each head from last to first, so that blocks that start together process
// the same rows even under a causal mask.
template <int Br, int Bc>
struct RowTileIterator {
  int head, first_row, first, last, left;
  const Extent* extent;
  int first_key;

  __device__ __forceinline__ RowTileIterator(const Extent& extent, int first_key, int kv_head,
                                             int group)
      : head(kv_head * group), extent(&extent), first_key(first_key) {
    const int end = row_end(extent, first_key, Bc);
    first = row_begin(extent, first_key) / Br * Br;
    const int tiles = end > first ? cdiv(end - first, Br) : 0;
    first_row = last = first + (tiles - 1) * Br;
    left = tiles * group;
    if constexpr (has_row_tiles) {
      left = tiles > 0 ? group : 0;
      if (tiles > 0) go_to(map().template from<Br>(first));
    }
  }
  __device__ __forceinline__ auto map() const {
    return extent_of_head(*extent, head).row_tiles(first_key / Bc);
  }
  // With a block mask: moves to the tile at `row` or, past `last`, to the next of the `left` heads.
  __device__ __forceinline__ void go_to(int row) {
    for (first_row = row; first_row > last; first_row = map().template from<Br>(first)) {
      if (--left == 0) return;
      ++head;
    }
  }
  __device__ __forceinline__ void advance() {
    if constexpr (has_row_tiles) return go_to(map().template after<Br>(first_row));
    --left;
    first_row -= Br;
    if (first_row >= first) return;
    first_row = last;
    ++head;
  }
};
