#pragma once
// Which keys a query sees. Causal masks and ragged ends are one rule: the first so many keys.

#include <math.cuh>

// Query `row` sees keys 0 … visible_keys - 1. Under a causal mask key j is seen if
// j <= row + diagonal, where diagonal is N - M (bottom-right) or 0 (top-left).
__device__ __forceinline__ int visible_keys(int row, int N, int diagonal) {
  if constexpr (causal) return max(0, min(N, row + diagonal + 1));
  return N;
}

// The last tile of `size` keys that a row with so many visible keys takes part in. Tile 0 always
// counts, so that a row which sees nothing is still written once.
__device__ __forceinline__ int last_tile(int visible, int size) {
  return max(cdiv(visible, size), 1) - 1;
}
