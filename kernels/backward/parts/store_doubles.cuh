#pragma once
// Stores float64 gradients that are held in mma.cuh fragments.

#include <tile/tensor.cuh>

// Stores m * 16 rows from first_row, columns first_col … end_col - 1, times `factor`. Rows from
// `end` on are skipped.
template <int columns, int m, int n>
__device__ __forceinline__ void store_gradient(const double (&sums)[m][n][4], double factor,
                                               Tensor<result> gradient, int batch, int head,
                                               int first_row, int end, int lane, int first_col,
                                               int end_col = columns) {
  end_col = min(end_col, columns);
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = first_row + i * 8 + lane / 4;
    if (row >= end) continue;
    result* to = gradient.row(batch, head, row);
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      const int col = first_col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
      if (col < end_col) to[col] = sums[i / 2][j / 2][i % 2 * 2 + j % 2] * factor;
    }
  }
}
