#pragma once
// Finishes a warp's rows: divides O by the row sums, writes lse and, on request, row maxima. The
// four lanes that share four rows compute one logarithm each.

#include <attention/row_state.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

template <int m, int n, int pack_gqa>
__device__ __forceinline__ void finish_rows(real (&O)[m][n][4],
                                            const Rows<m * step, pack_gqa>& rows, Tensor<real> lse,
                                            int batch, int head, int lane, bool has_lse = true) {
  const timeline::Phase phase(timeline::epilogue);
  real own_sum = 0, own_maximum = 0, own_row_max = 0;
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    real sum = rows.sum[i / 2][i % 2];
    sum += __shfl_xor_sync(full_warp, sum, 1);
    sum += __shfl_xor_sync(full_warp, sum, 2);
    const real kept = rows.extent.kept_factor();
    const real inverse = sum == 0            ? real(0)
                         : sizeof(real) == 8 ? kept / sum
                                             : __fdividef(kept, sum);  // accurate if sum < 2^126
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) O[i / 2][j / 2][i % 2 * 2 + j % 2] *= inverse;
    if (lane % 4 == i % 4) own_sum = sum, own_maximum = rows.maximum[i / 2][i % 2];
    if constexpr (has_row_max) {
      real row_max = rows.row_max(i);
      row_max = fmax(row_max, __shfl_xor_sync(full_warp, row_max, 1));
      row_max = fmax(row_max, __shfl_xor_sync(full_warp, row_max, 2));
      if (lane % 4 == i % 4) own_row_max = row_max;
    }
    if (i % 4 < 3 && i + 1 < 2 * m) continue;  // lse is written after every fourth row and the last
    const int own = i / 4 * 4 + lane % 4, row = rows.row(0, 0) + own * 8;
    if (has_lse && own < 2 * m && row < rows.extent.M * pack_gqa) {
      *lse.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa) =
          own_maximum * ln2 + log(own_sum);
      write_row_max(rows.extent, row / pack_gqa, own_row_max, own_sum, row % pack_gqa);
    }
  }
}
