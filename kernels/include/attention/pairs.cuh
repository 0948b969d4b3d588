#pragma once
// A tile of Br rows and a tile of Bc keys: which of their pairs the mask shows.

#include <attention/mask.cuh>

// The rows that some key of `first_key` … `first_key` + Bc - 1 is seen by: from `first` to before
// `end`.
struct RowRange {
  int first, end;
};

__device__ __forceinline__ RowRange rows_that_see(int first_key, int M, int N, int causal_offset,
                                                  int window_offset) {
  RowRange rows = {0, M};
  const long long last_key = min(first_key + Bc, N) - 1;
  if constexpr (causal)
    rows.first = int(max(0LL, min((long long)M, first_key - (long long)causal_offset)));
  if constexpr (windowed) rows.end = int(max(0LL, min((long long)M, last_key - window_offset + 1)));
  return rows;
}

// A row tile and a key tile, and what the mask says of their pairs.
struct Pairs {
  int first_row, first_key, M, N, causal_offset, window_offset;

  __device__ __forceinline__ bool see(int row, int key) const {
    return sees_key(first_row + row, first_key + key, N, causal_offset, window_offset);
  }

  // Whether every row sees every key, of those that there are.
  __device__ __forceinline__ bool all() const {
    if constexpr (!has_mask) return true;
    const int last_row = min(first_row + Br, M) - 1;
    return kv_end(first_row, N, causal_offset) >= min(first_key + Bc, N) &&
           kv_begin(last_row, N, window_offset) <= first_key;
  }
};
