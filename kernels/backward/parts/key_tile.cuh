#pragma once
// A block's key tile and the row tiles that it loops over.

#include <attention/tile_index.cuh>
#include <backward/parts/longest_first.cuh>
#include <backward/parts/row_range.cuh>
#include <backward/parts/row_tile_number.cuh>
#include <timeline.cuh>

// A key tile and, in a share of its group's query heads, the row tiles that see some of its keys.
template <int Br, int Bc>
struct KeyTile {
  Extent extent;
  int first_key, kv_head, batch, first_row, end_row, group, share, heads, index;
  TilesOfRows<Br> number;

  // Calls body(head, first row, tile index) for each row tile.
  template <class Body>
  __device__ __forceinline__ void for_tiles(Body body) const {
#pragma unroll 1
    for (int head = share * heads; head < (share + 1) * heads; ++head) {
      const auto map = map_of(head);
#pragma unroll 1
      for (int row = map.template from<Br>(first_row); row < end_row;
           row = map.template after<Br>(row)) {
        timeline::event(timeline::tile, first_key, row);
        body(head, row, number(head, row));
      }
    }
  }
  // Returns the first row of the next row tile of a head, or -1 after the last one.
  __device__ __forceinline__ int after(int head, int row) const {
    const int next = map_of(head).template after<Br>(row);
    return next < end_row ? next : -1;
  }
  __device__ __forceinline__ auto map_of(int head) const {
    return extent_of_head(extent, head).row_tiles(first_key / Bc);
  }
};

// Returns key tile `number` of `all`, which follow `before` others; by default a block has one.
// `splits` blocks share a group.
template <int Br, int Bc, bool batch_first = false>
__device__ __forceinline__ auto key_tile(const Sizes& sizes, const Mods& mods, int kv_heads,
                                         int group, int heads, int splits = 1,
                                         int number = blockIdx.x, int all = gridDim.x,
                                         int before = 0) {
  const int tiles = max(cdiv(sizes.N, Bc), 1), shares = kv_heads * splits;
  const int index = before + longest_first(number, all, tiles);
  const auto [tile, first, second] =
      place_of_keys<Bc>(index, sizes, mods, batch_first ? all / (tiles * shares) : shares);
  const int share = batch_first ? second : first, batch = batch_first ? first : second;
  const int kv_head = share / splits;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  const int first_key = tile * Bc, first_row = row_begin(extent, first_key) / Br * Br;
  const int end_row = extent.N > 0 ? row_end(extent, first_key, Bc) : 0;
  const auto numbers = tiles_of<Br>(mods, batch, heads, sizes.M);
  return KeyTile<Br, Bc>{extent, first_key, kv_head,        batch, first_row, end_row,
                         group,  share,     group / splits, index, numbers};
}
