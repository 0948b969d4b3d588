#pragma once
// The tiles of a block that stays on its multiprocessor, one in each round of all blocks.

#include <attention/extent.cuh>

// The number of the tile that comes in a place. Under a causal mask the tiles of as many heads as
// make two rounds are dealt out together, the longest first, then those of the next.
__device__ __forceinline__ int tile_in_place(int place, int all, int tiles) {
  if constexpr (!causal) return place;
  const int together = max(1, 2 * int(gridDim.x) / tiles), first = place / (together * tiles);
  const int heads = min(together, all / tiles - first * together);
  const int rest = place % (together * tiles);
  return (first * together + rest % heads) * tiles + rest / heads;
}

// body(number of a tile, number of the round) for the tiles of a block, of `all`. Under a causal
// mask every second round goes from the last block to the first, so that all have about the same to
// do.
template <class Body>
__device__ __forceinline__ void for_own_tiles(int tiles, int all, Body body) {
  const int blocks = gridDim.x;
#pragma unroll 1
  for (int round = 0; round * blocks < all; ++round) {
    const bool back = causal && round % 2;
    const int place = round * blocks + (back ? blocks - 1 - int(blockIdx.x) : int(blockIdx.x));
    if (place < all) body(tile_in_place(place, all, tiles), round);
  }
}
