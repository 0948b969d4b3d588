#pragma once
// Tiles of dS that the pass for dK and dV keeps in global memory, for a round of query heads.

#include <attention/batch.cuh>

// Under a causal mask a line holds the tiles of two row tiles, the r-th from its start and the r-th
// last from its end: one sees few keys, the other many. Hidden tiles take up no memory.
template <int Br, int Bc>
struct KeptTiles {
  int row_tiles, lines, line_tiles;

  __device__ __forceinline__ explicit KeptTiles(const Sizes& sizes)
      : row_tiles(cdiv(sizes.M, Br)),
        lines(causal ? cdiv(row_tiles, 2) : row_tiles),
        line_tiles(cdiv(sizes.N, Bc)) {
    if constexpr (!causal) return;
    // Both row tiles of a line see fewer than this many tiles of keys; see line_tiles() of the
    // host.
    const long long both = ((row_tiles + 1LL) * Br + 2LL * sizes.causal_offset - 2 + 2LL * Bc) / Bc;
    line_tiles = int(max((long long)line_tiles, min(2LL * line_tiles, both)));
  }
  __device__ __forceinline__ int tile(int head, int row_tile, int key_tile) const {
    int line = row_tile, place = key_tile;
    if (causal && row_tile >= lines) {
      line = row_tiles - 1 - row_tile;
      place = line_tiles - 1 - key_tile;
    }
    return (head * lines + line) * line_tiles + place;
  }
};
