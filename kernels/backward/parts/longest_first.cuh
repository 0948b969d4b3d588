#pragma once
// Tile order of a launch. Under a causal mask the first tiles of a head are the longest. Tiles of
// the last heads are interleaved, longest first, so that all SMs finish at about the same time.
// Earlier heads are processed in order, so that concurrent blocks share rows in L2.

#include <attention/extent.cuh>

// Returns the tile index of a block, counted head by head with `tiles` tiles per head.
__device__ __forceinline__ int longest_first(int block, int blocks, int tiles) {
  if constexpr (!causal || packed) return block;
  const int heads = min(cdiv(2 * 132, tiles), blocks / tiles);  // two waves of an H100
  const int first = blocks - heads * tiles, place = block - first;
  return place < 0 ? block : first + place % heads * tiles + place / heads;
}
