#pragma once
// Row maxima of a warp. A lane holds a quarter of two rows per 16; two shuffles reduce a row.

#include <attention/row_state.cuh>
#include <tile/warp.cuh>

// Reduces each row of a score tile to its maximum, in all four lanes of the row. If `masked`,
// hidden scores become -infinity. Each fmax depends on the previous one, so a warp with only 16
// rows reduces even and odd keys separately, which keeps twice as many in flight.
template <bool masked, int m, int n, int pack_gqa>
__device__ __forceinline__ void find_maxima(real (&S)[m][n][4],
                                            const Rows<m * step, pack_gqa>& rows, int first_key,
                                            int lane, real (&maximum)[m][2]) {
  constexpr int parts = m == 1 && sizeof(real) == 4 ? 2 : 1;
  real part[m][2][parts];
#pragma unroll
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int i = 0; i < m * 4; ++i) {
      const int half = i % 4 / 2, key = first_key + j * 8 + 2 * (lane % 4) + i % 2;
      real &score = S[i / 4][j][i % 4], &x = part[i / 4][half][i % parts];
      if (masked && !rows.in_reach(i / 4, half, key)) score = -infinity;
      x = j * 8 + i % 2 < parts ? score : fmax(x, score);  // the first score initialises x
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    auto& own = part[i / 2][i % 2];
    if constexpr (parts == 2) own[0] = fmax(opaque(own[0]), opaque(own[1]));
    const real x = fmax(own[0], __shfl_xor_sync(full_warp, own[0], 1));
    maximum[i / 2][i % 2] = fmax(x, __shfl_xor_sync(full_warp, x, 2));
  }
}

template <int m, int n>
__device__ __forceinline__ void scale_rows(real (&O)[m][n][4], const real (&factor)[m][2]) {
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i)
    O[i / (4 * n)][i / 4 % n][i % 4] *= factor[i / (4 * n)][i % 4 / 2];
}
