#pragma once
// Which row tiles a block computes that stays on its multiprocessor.

#include <attention/extent.cuh>

// Row tiles are dealt out in rounds. With a causal mask, where tiles differ in length, the tiles of
// as many heads as make two rounds are dealt out together, the longest first; the second round goes
// from the last block to the first, which evens out the first round. So all blocks have about the
// same to do, and heads whose K and V are in the cache are finished before others.
template <int Br, int Bc>
struct Schedule {
  Sizes sizes;
  int heads, all_heads, first = 0, round = 0, seat = blockIdx.x;

  // The block's next row tile, with at least one tile of keys: without keys it is one of zeros.
  __device__ __forceinline__ bool next(RowTile& task) {
    const int tiles = cdiv(sizes.M, Br), blocks = gridDim.x;
    const int together = causal ? max(1, 2 * blocks / tiles) : all_heads;
    for (; first < all_heads; first += together, round = 0) {
      const int size = min(together, all_heads - first), count = size * tiles;
      const int index = round * blocks + (round % 2 ? blocks - 1 - seat : seat);
      round += 1;
      if (index < count) {
        const int tile = causal ? tiles - 1 - index / size : index % tiles;
        const int head = first + (causal ? index % size : index / tiles), batch = head / heads;
        const Extent extent = extent_of(sizes, batch);
        task = row_tile<Br, Bc>(extent, tile * Br, head % heads, batch);
        if (extent.N == 0) task.kv_begin = 1;
        task.kv_end = max(task.kv_end, task.kv_begin + 1);
        return true;
      }
      // The blocks that had one tile less begin with the next heads.
      const int left = count % blocks;
      seat = (seat + (cdiv(count, blocks) % 2 ? blocks - left : left)) % blocks;
    }
    return false;
  }

  // Where the keys end that a warpgroup sees which has `rows` of the tile's rows. It may skip the
  // tiles after that, but at most `most` of them.
  template <int rows>
  __device__ __forceinline__ int own_end(const RowTile& task, int warpgroup, int most) const {
    if constexpr (!causal) return task.kv_end;
    const Extent extent = extent_of(sizes, task.batch);
    const int own = extent.kv_end(min(task.row + (warpgroup + 1) * rows, extent.M) - 1);
    return max(max(own, task.kv_end - most * Bc), task.kv_begin + 1);
  }
};
