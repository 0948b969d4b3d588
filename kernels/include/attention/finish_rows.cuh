#pragma once
// The end of a warp's rows: O / sum, and lse.

#include <attention/row_state.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

// The bits of a value if it is wanted, else 0; the caller takes several together by |. Compilers
// turn a choice between array elements into one between addresses, and put the array into memory.
__device__ __forceinline__ unsigned bits_if(bool wanted, float value) {
  return wanted ? __float_as_uint(value) : 0;
}

// O / sum, and lse: each of a row's four lanes computes that of another row.
template <int m, int n, int pack_gqa>
__device__ __forceinline__ void finish_rows(float (&O)[m][n][4],
                                            const Rows<m * step, pack_gqa>& rows, Tensor<real> lse,
                                            int batch, int head, int lane) {
#pragma unroll
  for (int first = 0; first < 2 * m; first += 4) {
    unsigned own_sum = 0, own_maximum = 0;
#pragma unroll
    for (int i = first; i < min(first + 4, 2 * m); ++i) {
      float sum = rows.sum[i / 2][i % 2];
      sum += __shfl_xor_sync(full_warp, sum, 1);
      sum += __shfl_xor_sync(full_warp, sum, 2);
      own_sum |= bits_if(lane % 4 == i - first, sum);
      own_maximum |= bits_if(lane % 4 == i - first, rows.maximum[i / 2][i % 2]);
      const float inverse = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
      for (int j = 0; j < n; ++j) {
        O[i / 2][j][i % 2 * 2] *= inverse;
        O[i / 2][j][i % 2 * 2 + 1] *= inverse;
      }
    }
    const int own = first + lane % 4, row = rows.row(0, 0) + own * 8;
    if (own < 2 * m && row < rows.extent.M * pack_gqa)
      *lse.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa) =
          __uint_as_float(own_maximum) / log2e + log(__uint_as_float(own_sum));
  }
}
