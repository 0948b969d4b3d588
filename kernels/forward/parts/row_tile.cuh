#pragma once
// What a block does that owns rows: a tile of rows of one head, and the keys that some of them see.

#include <attention/mask.cuh>
#include <tile/tensor.cuh>

struct Work {
  int row, head, batch, start, end;
};

// That of the tile with this index, of so many rows; it starts where a tile of keys does.
template <int rows, int keys>
__device__ __forceinline__ Work find_work(int index, int M, int N, int heads, int causal_offset,
                                          int window_offset) {
  const int tiles = cdiv(M, rows);
  const auto [tile, head, batch] = place(index, tiles, heads);
  const int row = (tiles - 1 - tile) * rows;  // the longest rows of a causal mask first
  return {row, head, batch, kv_begin(row, N, window_offset) / keys * keys,
          kv_end(min(row + rows, M) - 1, N, causal_offset)};
}
