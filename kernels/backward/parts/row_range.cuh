#pragma once
// Rows row_begin() … row_end() - 1 see at least one of the `keys` keys from first_key on.

#include <attention/extent.cuh>

__device__ __forceinline__ int row_begin(const Extent& extent, int first_key) {
  if constexpr (causal)
    return int(max(0LL, min((long long)extent.M, first_key - (long long)extent.causal_offset)));
  return 0;
}

__device__ __forceinline__ int row_end(const Extent& extent, int first_key, int keys) {
  const long long last_key = min(first_key + keys, extent.N) - 1;
  if constexpr (windowed)
    return int(max(0LL, min((long long)extent.M, last_key - extent.window_offset + 1)));
  return extent.M;
}
