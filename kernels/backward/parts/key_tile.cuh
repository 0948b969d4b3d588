#pragma once
// A block's key tile and the row tiles that it loops over.

#include <attention/tile_index.cuh>
#include <backward/parts/longest_first.cuh>
#include <backward/parts/row_range.cuh>
#include <backward/parts/row_tile_number.cuh>
#include <timeline.cuh>

// A key tile and, in each query head that the block processes, the row tiles that see some of its
// keys. A block processes `block_heads` heads: the key head's group, or a share of it.
template <int Br, int Bc>
struct KeyTile {
  Extent extent;
  int first_key, kv_head, batch, first_row, end_row, group;
  int share, block_heads;
  int slot;  // index of the key tile, over all key heads
  TilesOfRows<Br> number;

  // Calls body(head, first row, tile index) for each row tile.
  template <class Body>
  __device__ __forceinline__ void for_tiles(Body body) const {
#pragma unroll 1
    for (int head = first_head(); head < end_head(); ++head) {
      const auto map = map_of(head);
#pragma unroll 1
      for (int row = map.template from<Br>(first_row); row < end_row;
           row = map.template after<Br>(row)) {
        timeline::event(timeline::tile, first_key, row);
        body(head, row, number(head, row));
      }
    }
  }
  __device__ __forceinline__ int first_head() const { return share * block_heads; }
  __device__ __forceinline__ int end_head() const { return (share + 1) * block_heads; }
  // Returns the first row of the next row tile of a head, or -1 after the last one.
  __device__ __forceinline__ int after(int head, int row) const {
    const int next = map_of(head).template after<Br>(row);
    return next < end_row ? next : -1;
  }
  __device__ __forceinline__ bool is_first(int head, int row) const {
    return row == map_of(head).template from<Br>(first_row);
  }
  __device__ __forceinline__ auto map_of(int head) const {
    return extent_of_head(extent, head).row_tiles(first_key / Bc);
  }
};

// Returns key tile `number` of `all`. If blocks share groups, each processes `block_heads` heads.
template <int Br, int Bc, bool batch_first, bool shares_groups>
__device__ __forceinline__ KeyTile<Br, Bc> shared_key_tile(const Sizes& sizes, const Mods& mods,
                                                           int kv_heads, int group, int heads,
                                                           int block_heads, int number, int all) {
  const int shares = shares_groups ? heads / block_heads : kv_heads;
  const int tiles = max(cdiv(sizes.N, Bc), 1), batches = all / (tiles * shares);
  const int index = longest_first(number, all, tiles);
  const auto [tile, first, second] =
      place_of_keys<Bc>(index, sizes, mods, batch_first ? batches : shares);
  const int share = batch_first ? second : first, batch = batch_first ? first : second;
  const int kv_head = shares_groups ? share * block_heads / group : share;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  const int first_key = tile * Bc, first_row = row_begin(extent, first_key) / Br * Br;
  const int end_row = extent.N > 0 ? row_end(extent, first_key, Bc) : 0;
  const auto numbers = tiles_of<Br>(mods, batch, heads, sizes.M);
  const int of_head = all / shares;  // number of key tiles per head, in all batch elements
  const int slot = kv_head * of_head + (packed ? index % of_head : batch * tiles + tile);
  return {extent, first_key, kv_head,     batch, first_row, end_row,
          group,  share,     block_heads, slot,  numbers};
}

// Returns key tile `number` of `all`. By default a block is not persistent and has one tile, and
// processes all query heads of its key head.
template <int Br, int Bc, bool batch_first = false>
__device__ __forceinline__ KeyTile<Br, Bc> key_tile(const Sizes& sizes, const Mods& mods,
                                                    int kv_heads, int group, int heads,
                                                    int number = blockIdx.x, int all = gridDim.x) {
  return shared_key_tile<Br, Bc, batch_first, false>(sizes, mods, kv_heads, group, heads, group,
                                                     number, all);
}
