#pragma once
// Stores O from a warp's registers. Each lane stores its elements of the first `cols` columns one
// by one, because rows of a view may be unaligned.

#include <attention/row_state.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

template <int cols, int m, int n, int pack_gqa>
__device__ __forceinline__ void store_rows(const real (&O)[m][n][4],
                                           const Rows<m * step, pack_gqa>& rows, Tensor<result> out,
                                           int batch, int head, int lane, int first_col = 0) {
  const timeline::Phase phase(timeline::epilogue);
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = rows.row(i / 2, i % 2);
    if (row >= rows.extent.M * pack_gqa) continue;
    result* to = out.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa);
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      const int col = first_col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
      if (col < cols) to[col] = result(O[i / 2][j / 2][i % 2 * 2 + j % 2]);
    }
  }
}
