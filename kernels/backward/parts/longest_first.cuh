#pragma once
// Tile order of a launch. Under a causal mask the first tiles of a head are the longest. Tiles of
// the last heads are interleaved, longest first, so that all SMs finish at about the same time.
// Earlier heads are processed in order, so that concurrent blocks share rows in L2.

#include <attention/extent.cuh>

// Returns the tile index of a block, counted head by head with `tiles` tiles per head. An SM runs
// `at_a_time` blocks.
__device__ __forceinline__ int longest_first(int block, int blocks, int tiles, int at_a_time = 1) {
  if constexpr (!causal || packed) return block;
  const int wave = 132 * at_a_time;  // of an H100
  const int heads = min(cdiv(2 * wave, tiles), blocks / tiles);
  const int first = blocks - heads * tiles, place = block - first;
  return place < 0 ? block : first + place % heads * tiles + place / heads;
}
