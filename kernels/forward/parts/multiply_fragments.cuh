#pragma once
// One step of a matrix product of a warp's rows.

#include <ptx/mma.cuh>

// D += A B for 16 columns of A. load(b, j) loads B's fragments for columns 16 j to 16 j + 15.
template <class T, int m, int n, class Load>
__device__ __forceinline__ void multiply_fragments(float (&D)[m][n][4], const unsigned (&a)[m][4],
                                                   Load load) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) {
    unsigned b[4];
    load(b, j);
#pragma unroll
    for (int i = 0; i < 2 * m; ++i)
      multiply_add<T>(D[i / 2][2 * j + i % 2], a[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
  }
}
