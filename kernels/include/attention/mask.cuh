#pragma once
// Which keys a query sees: from the first that is not hidden on the left, which is the window's
// rule, to the last of the first so many, which is the rule of causal masks and ragged ends.

#include <attention/extent.cuh>

// Query `row` sees keys 0 … kv_end - 1. Under a causal mask key j is seen if
// j <= row + diagonal, where diagonal is N - M (bottom-right) or 0 (top-left), and larger by what a
// window shows on the right.
__device__ __forceinline__ int kv_end(int row, int N, int causal_offset) {
  if constexpr (causal) return max(0, min(N, row + causal_offset + 1));
  return N;
}

// Of these, query `row` does not see keys 0 … kv_begin - 1. In a window key j is hidden if
// j < row + lower, where lower is as diagonal, less what the window shows on the left.
__device__ __forceinline__ int kv_begin(int row, int N, int window_offset) {
  if constexpr (windowed) return max(0, min(N, row + window_offset));
  return 0;
}

// Whether query `row` sees a key. Below the window the unsigned difference is larger than in it, so
// one comparison is for both of its ends.
__device__ __forceinline__ bool sees_key(int row, int key, int N, int causal_offset,
                                         int window_offset) {
  if constexpr (windowed) {
    const int inside = key - row - window_offset;
    return key < N &&
           (causal ? unsigned(inside) <= unsigned(causal_offset - window_offset) : inside >= 0);
  }
  return key < kv_end(row, N, causal_offset);
}

// How many of the keys of a tile that begins at `first_key` are hidden.
__device__ __forceinline__ int hidden_in_tile(int hidden, int first_key) {
  if constexpr (windowed) return max(0, hidden - first_key);
  return 0;
}
