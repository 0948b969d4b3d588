#pragma once
// Returns the index of the last tile of `size` keys that a row sees; at least 0, so that a row
// without visible keys is written, too.

#include <tile/math.cuh>

__device__ __forceinline__ int last_tile(int kv_end, int size) {
  return max(cdiv(kv_end, size), 1) - 1;
}
