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

// body(number of a tile) for each tile of a block that stays on its multiprocessor. Under a causal
// mask the tiles of as many heads as make two rounds are dealt out together, the longest first and
// the second round from the last block to the first: so all blocks have about the same to do.
template <class Body>
__device__ __forceinline__ void for_own_tiles(int tiles, int all, Body body) {
  const int blocks = gridDim.x, block = blockIdx.x, heads = all / tiles;
  if constexpr (!causal) {
#pragma unroll 1
    for (int i = block; i < all; i += blocks) body(i);
  } else {
    const int together = max(1, 2 * blocks / tiles), rounds = max(2, cdiv(tiles, blocks));
#pragma unroll 1
    for (int i = 0; i / rounds * together < heads; ++i) {
      const int first = i / rounds * together, size = min(together, heads - first);
      const int round = i % rounds, seat = round % 2 ? blocks - 1 - block : block;
      const int place = round * blocks + seat;
      if (place < size * tiles) body((first + place % size) * tiles + place / size);
    }
  }
}
