#pragma once
// The order of tiles. Under a causal mask the first tiles of a head are the longest. Tiles of the
// last heads are interleaved, the longest first, so that multiprocessors end at about the same
// time. Earlier heads follow each other, so that concurrent blocks share rows in L2.

#include <attention/extent.cuh>

// Returns the number of a block's tile, counted head by head; a head has `tiles` tiles.
__device__ __forceinline__ int longest_first(int block, int blocks, int tiles) {
  if constexpr (!causal || packed) return block;
  const int heads = min(cdiv(2 * 132, tiles), blocks / tiles);  // two rounds of an H100
  const int first = blocks - heads * tiles, place = block - first;
  return place < 0 ? block : first + place % heads * tiles + place / heads;
}
