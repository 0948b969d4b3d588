#pragma once
// Rows that a masked key's infinity or NaN got into: its weight is 0, but 0 * NaN is NaN. That is
// rare, so products take all keys of a tile, and rows that came out strange are computed once more.

#include <attention/row_state.cuh>
#include <attention/mask.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

// Whether one of the warp's sums is NaN.
template <int m, int blocks>
__device__ __forceinline__ bool has_nonfinite(const float (&O)[m][blocks][4]) {
  bool nonfinite = false;
#pragma unroll
  for (int n = 0; n < blocks; ++n) {
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) nonfinite |= O[i][n][e] != O[i][n][e];
    }
  }
  return __any_sync(full_warp, nonfinite);
}

// Writes the warp's rows of O, from their maxima and sums, by the keys that each row sees alone.
__device__ void recompute_rows(Tensor<const operand> Q, Tensor<const operand> K,
                               Tensor<const operand> V, Tensor<scalar> O, const Rows<step>& rows,
                               int batch, int head, int kv_head, int M, float scale) {
  constexpr int o_count = cdiv(dv, warp_size);
  const int lane = threadIdx.x % warp_size;
  for (int i = 0; i < step; ++i) {
    const int row = __shfl_sync(full_warp, rows.first, 0) + i, half = i / 8;
    if (row >= M) return;
    float sum = half ? rows.sum[0][1] : rows.sum[0][0];
    sum += __shfl_xor_sync(full_warp, sum, 1);
    sum += __shfl_xor_sync(full_warp, sum, 2);
    sum = __shfl_sync(full_warp, sum, i % 8 * 4);
    const float maximum =
        __shfl_sync(full_warp, half ? rows.maximum[0][1] : rows.maximum[0][0], i % 8 * 4);
    const operand *q = Q.row(batch, head, row), *k, *v;
    float o[o_count] = {};
    const int end = kv_end(row, rows.extent.N, rows.extent.causal_offset);
    for (int key = kv_begin(row, rows.extent.N, rows.extent.window_offset); key < end; ++key) {
      k = K.row(batch, kv_head, key), v = V.row(batch, kv_head, key);
      float score = 0;
      for (int j = lane; j < d; j += warp_size) score += float(q[j]) * float(k[j]);
      const float weight = exp2f(warp_sum(score) * scale * log2e - maximum);
#pragma unroll
      for (int j = 0; j < o_count; ++j) {
        const int col = lane + j * warp_size;
        if (col < dv) o[j] += weight * float(v[col]);
      }
    }
    const float inverse = sum == 0 ? 0.0f : 1 / sum;
#pragma unroll
    for (int j = 0; j < o_count; ++j) {
      const int col = lane + j * warp_size;
      if (col < dv) O.row(batch, head, row)[col] = scalar(o[j] * inverse);
    }
  }
}
