#pragma once
// Gradients that come out as infinity or NaN are computed once more. A masked pair has P = 0, but
// 0 * NaN is NaN, and an element of P or dS may be more than 16 bits hold. Both are rare, so
// products take all pairs of a tile; a warp whose sums are not finite computes its rows or keys
// again in float32, from the pairs that the mask shows.

#include <attention/score.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

// Whether all of the warp's sums are finite.
template <int m, int n>
__device__ __forceinline__ bool all_finite(const float (&sums)[m][n][4]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) finite &= fabs(sums[i / 4 / n][i / 4 % n][i % 4]) < infinity;
  return __all_sync(full_warp, finite);
}
template <int count>
__device__ __forceinline__ bool all_finite(const float (&sums)[count]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < count; ++i) finite &= fabs(sums[i]) < infinity;
  return __all_sync(full_warp, finite);
}

// What the forward pass left of a row: lse in powers of two, and delta. A row that sees no key has
// infinity and 0, which make its P 0; an lse that is infinite otherwise comes with delta = NaN.
struct RowStats {
  float lse2, delta;

  __device__ __forceinline__ bool sees_keys() const { return lse2 != infinity || delta != 0; }
};

// A batch element and key head, of whose inputs gradients are computed again. stats(head, row)
// gives a row's RowStats.
template <int d, int dv, class T, class Stats>
struct alignas(16) Repair {
  Extent extent;
  Tensor<const T> Q, K, V, dO;
  Stats stats;
  Scorer<float> scorer;
  int batch, kv_head;

  struct Pair {
    float p, dS;
  };

  // P and dS of a row and a key, which the warp computes together.
  __device__ Pair pair(int head, int row, int key, const RowStats& own) const {
    const T *q = Q.row(batch, head, row), *k = K.row(batch, kv_head, key);
    const T *grad = dO.row(batch, head, row), *v = V.row(batch, kv_head, key);
    float product = 0, dP = 0;
    for (int j = threadIdx.x % warp_size; j < d; j += warp_size)
      product += float(q[j]) * float(k[j]);
    for (int j = threadIdx.x % warp_size; j < dv; j += warp_size)
      dP += float(grad[j]) * float(v[j]);
    const auto [score, slope] = scorer.with_slope(warp_sum(product));
    const float p = exp2f(score * log2e - own.lse2);
    return {p, score_gradient(p, warp_sum(dP) - own.delta, slope)};
  }

  // dQ of rows `first` … `end` - 1, of which the warp owns `width` columns from first_col on.
  template <int width>
  __device__ void rows(Tensor<T> dQ, int head, int first, int end, int first_col) const {
    constexpr int count = cdiv(width, warp_size);
    const int lane = threadIdx.x % warp_size, last_col = min(d, first_col + width);
    for (int row = first; row < min(end, extent.M); ++row) {
      const RowStats own = stats(head, row);
      float sums[count] = {};
      const int last = own.sees_keys() ? extent.kv_end(row) : 0;
      for (int key = extent.kv_begin(row); key < last; ++key) {
        const float dS = pair(head, row, key, own).dS;
#pragma unroll
        for (int j = 0; j < count; ++j) {
          const int col = first_col + lane + j * warp_size;
          if (col < last_col) sums[j] += dS * float(K.row(batch, kv_head, key)[col]);
        }
      }
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const int col = first_col + lane + j * warp_size;
        if (col < last_col) dQ.row(batch, head, row)[col] = T(sums[j] * scorer.scale);
      }
    }
  }

  // dK, or dV, of keys `first` … `end` - 1, likewise, summed over the `group` heads that share
  // them.
  template <bool of_V, int width>
  __device__ void keys(Tensor<T> gradient, int group, int first, int end, int first_col) const {
    constexpr int count = cdiv(width, warp_size);
    const int lane = threadIdx.x % warp_size, last_col = min(of_V ? dv : d, first_col + width);
    for (int key = first; key < min(end, extent.N); ++key) {
      float sums[count] = {};
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int row = extent.row_begin(key); row < extent.row_end(key, 1); ++row) {
          const RowStats own = stats(head, row);
          if (!own.sees_keys() || !extent.sees(row, key)) continue;
          const Pair made = pair(head, row, key, own);
#pragma unroll
          for (int j = 0; j < count; ++j) {
            const int col = first_col + lane + j * warp_size;
            if (col >= last_col) continue;
            sums[j] += of_V ? made.p * float(dO.row(batch, head, row)[col])
                            : made.dS * float(Q.row(batch, head, row)[col]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const int col = first_col + lane + j * warp_size;
        if (col < last_col)
          gradient.row(batch, kv_head, key)[col] = T(of_V ? sums[j] : sums[j] * scorer.scale);
      }
    }
  }
};
