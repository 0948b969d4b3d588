#pragma once
// Detects accumulators that became NaN or infinite, for example because of a masked pair.

#include <tile/math.cuh>
#include <tile/warp.cuh>

// Returns whether all accumulators of the warp are finite.
template <int m, int n>
__device__ __forceinline__ bool all_finite(const real (&sums)[m][n][4]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) finite &= fabs(sums[i / 4 / n][i / 4 % n][i % 4]) < infinity;
  return __all_sync(full_warp, finite);
}
