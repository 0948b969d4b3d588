#pragma once
// Sums that came out as infinity or NaN, for what pairs that do not count brought in: their weight
// is 0, but 0 * NaN is NaN. That is rare, so products take all pairs of tiles, and such sums are
// computed once more, by the pairs that count. So are those of which 16 bits could not hold a term.

#include <attention/mask.cuh>
#include <backward/parts/row_sums.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

// Whether one of the warp's sums is infinite or NaN.
template <int count>
__device__ __forceinline__ bool has_nonfinite(const float (&sums)[count]) {
  bool nonfinite = false;
#pragma unroll
  for (int i = 0; i < count; ++i) nonfinite |= !(fabs(sums[i]) < infinity);
  return __any_sync(full_warp, nonfinite);
}

// P and dS of a row and a key, which a warp computes together.
struct Pair {
  float weight, slope;
};

__device__ __forceinline__ Pair weigh_pair(const scalar* q, const scalar* k, const scalar* grad,
                                           const scalar* v, float lse2, float delta, float scale,
                                           int lane) {
  float score = 0, slope = 0;
  for (int j = lane; j < d; j += warp_size) score += float(q[j]) * float(k[j]);
  for (int j = lane; j < dv; j += warp_size) slope += float(grad[j]) * float(v[j]);
  const float weight = exp2f(warp_sum(score) * (scale * log2e) - lse2);
  return {weight, weight * (warp_sum(slope) - delta)};
}

// dQ of 16 rows from a column on, by the keys that each row sees alone.
template <int width>
__device__ void recompute_rows(Tensor<const scalar> Q, Tensor<const scalar> K,
                               Tensor<const scalar> V, Tensor<const scalar> dO, Tensor<scalar> dQ,
                               const RowSums* row_sums, int first, int head, int heads, int kv_head,
                               int batch, int M, int N, int causal_offset, int window_offset,
                               float scale, int first_col) {
  constexpr int count = cdiv(width, warp_size);
  const int lane = threadIdx.x % warp_size;
  for (int row = first; row < min(first + step, M); ++row) {
    const RowSums& sums = row_sums[tile_of(batch, head, heads, row, M)];
    const scalar *q = Q.row(batch, head, row), *grad = dO.row(batch, head, row);
    float gradient[count] = {};
    const int end = sums.counts(row % Br) ? kv_end(row, N, causal_offset) : 0;
    for (int key = kv_begin(row, N, window_offset); key < end; ++key) {
      const scalar *k = K.row(batch, kv_head, key), *v = V.row(batch, kv_head, key);
      const Pair pair =
          weigh_pair(q, k, grad, v, sums.lse2[row % Br], sums.delta[row % Br], scale, lane);
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const int col = first_col + lane + j * warp_size;
        if (col < d) gradient[j] += pair.slope * float(k[col]);
      }
    }
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const int own = lane + j * warp_size;
      if (own < width && first_col + own < d)
        dQ.row(batch, head, row)[first_col + own] = scalar(gradient[j] * scale);
    }
  }
}
