#pragma once
// The last tile of `size` keys that a row sees. Tile 0 always counts, so that a row that sees no
// key is still written.

#include <tile/math.cuh>

__device__ __forceinline__ int last_tile(int kv_end, int size) {
  return max(cdiv(kv_end, size), 1) - 1;
}
