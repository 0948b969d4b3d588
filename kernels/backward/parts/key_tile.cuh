#pragma once
// The tiles of rows that a block with a tile of keys goes through, in kernels whose warpgroups own
// keys.

#include <attention/extent.cuh>
#include <backward/parts/row_sums.cuh>

// A block's keys, and the tiles of rows that see some of them, in each head of the group.
template <int Br, int Bc>
struct KeyTile {
  Extent extent;
  int first_key, kv_head, batch, first_row, end_row, group;
  TilesOfRows<Br> number;

  // body(head, first row, number of the tile) for each tile.
  template <class Body>
  __device__ __forceinline__ void for_tiles(Body body) const {
#pragma unroll 1
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const auto map = map_of(head);
#pragma unroll 1
      for (int row = map.template from<Br>(first_row); row < end_row;
           row = map.template after<Br>(row))
        body(head, row, number(head, row));
    }
  }
  // Whether it is a head's first tile; where the next one begins, or -1 if there is none.
  __device__ __forceinline__ int after(int head, int row) const {
    const int next = map_of(head).template after<Br>(row);
    return next < end_row ? next : -1;
  }
  __device__ __forceinline__ bool is_first(int head, int row) const {
    return row == map_of(head).template from<Br>(first_row);
  }
  __device__ __forceinline__ auto map_of(int head) const {
    return extent.of_head(head).row_tiles(first_key / Bc);
  }
};

template <int Br, int Bc, bool batch_first = false>
__device__ __forceinline__ KeyTile<Br, Bc> key_tile(const Sizes& sizes, const Mods& mods,
                                                    int kv_heads, int group, int heads) {
  // With a causal mask the first keys have the most rows.
  const int tiles = max(cdiv(sizes.N, Bc), 1), batches = int(gridDim.x) / (tiles * kv_heads);
  const auto [tile, first, second] =
      place_of_keys<Bc>(blockIdx.x, sizes, mods, batch_first ? batches : kv_heads);
  const int kv_head = batch_first ? second : first, batch = batch_first ? first : second;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  const int first_key = tile * Bc, first_row = extent.row_begin(first_key) / Br * Br;
  const int end_row = extent.N > 0 ? extent.row_end(first_key, Bc) : 0;
  const auto number = tiles_of<Br>(mods, batch, heads, sizes.M);
  return {extent, first_key, kv_head, batch, first_row, end_row, group, number};
}
