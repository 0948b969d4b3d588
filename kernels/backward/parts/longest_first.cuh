#pragma once
// The order of tiles. Under a causal mask the first tiles of a head are the longest. Those of the
// last heads are dealt out together, the longest first, so that multiprocessors end at about the
// same time. Earlier heads follow each other, so that blocks which run together share rows in L2.

#include <attention/extent.cuh>

// The number of a block's tile, counted head by head; `tiles` is the number of tiles of a head.
__device__ __forceinline__ int longest_first(int block, int blocks, int tiles) {
  if constexpr (!causal || packed) return block;
  const int heads = min(cdiv(264, tiles), blocks / tiles);  // two rounds on an H100
  const int first = blocks - heads * tiles, place = block - first;
  return place < 0 ? block : first + place % heads * tiles + place / heads;
}

// The same where blocks go from tile to tile: the tiles of as many heads as make two rounds are
// dealt out together, then those of the next.
__device__ __forceinline__ int longest_first_of_two_rounds(int place, int all, int tiles) {
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
    if (place < all) body(longest_first_of_two_rounds(place, all, tiles), round);
  }
}
