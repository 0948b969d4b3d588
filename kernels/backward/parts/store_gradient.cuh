#pragma once
// Stores gradients that are held in mma.cuh fragments.

#include <tile/store.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

// Stores m * 16 rows from first_row, columns first_col … end_col - 1, times `factor`; 16 bytes at a
// time where rows are aligned. Rows from `end` on are skipped.
template <int columns, int m, int n>
__device__ __forceinline__ void store_gradient(const float (&sums)[m][n][4], float factor,
                                               Tensor<result> gradient, int batch, int head,
                                               int first_row, int end, int lane, int first_col = 0,
                                               int end_col = columns) {
  const timeline::Phase phase(timeline::epilogue);
  const bool aligned = is_aligned(gradient);
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    decltype(stored_pair<result>(0, 0)) pairs[n];
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const float (&sum)[4] = sums[i / 2][j];
      pairs[j] = stored_pair<result>(sum[i % 2 * 2] * factor, sum[i % 2 * 2 + 1] * factor);
    }
    const int row = first_row + i * 8 + lane / 4;
    store_row<columns>(gradient.row(batch, head, row), pairs, first_col, aligned, row < end, lane,
                       end_col);
  }
}
