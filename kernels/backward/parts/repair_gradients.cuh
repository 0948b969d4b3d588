#pragma once
// Recomputes gradients that are infinite or NaN. A masked pair has P = 0, but 0 * NaN is
// NaN, and P or dS may overflow 16 bits. Both are rare, so the main loop multiplies all pairs of a
// tile; a warp with non-finite accumulators recomputes its rows or keys unrounded, from visible
// pairs only. Rows with a huge lse are recomputed, too (row_stats.cuh).

#include <attention/score.cuh>
#include <attention/dropped_weights.cuh>
#include <backward/parts/all_finite.cuh>
#include <backward/parts/row_stats.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

// A warp's accumulators for one gradient row: `width` columns from first_col, below `columns`.
template <int width>
struct RowSum {
  static constexpr int count = cdiv(width, warp_size);
  int first, end;
  real sums[count] = {};

  __device__ __forceinline__ RowSum(int first_col, int columns)
      : first(first_col + threadIdx.x % warp_size), end(min(columns, first_col + width)) {}

  template <class T>
  __device__ __forceinline__ void add(real number, const T* row) {
#pragma unroll
    for (int j = 0; j < count; ++j)
      if (first + j * warp_size < end) sums[j] += number * real(row[first + j * warp_size]);
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, real factor) const {
#pragma unroll
    for (int j = 0; j < count; ++j)
      if (first + j * warp_size < end) row[first + j * warp_size] = T(sums[j] * factor);
  }
};

// Recomputes gradients of one batch element and key head from its inputs. stats(head, row) returns
// a row's RawStats.
template <int d, int dv, class T, class Stats>
struct alignas(16) Repair {
  Extent extent;
  Tensor<const T> Q, K, V, dO;
  Stats stats;
  Scorer<real> scorer;
  int batch, kv_head;

  struct Pair {
    real p, dS;
  };

  // Computes P (after dropout) and dS of one row and key, with all lanes of the warp.
  __device__ Pair pair(int head, int row, int key, const RawStats& own) const {
    const T *q = Q.row(batch, head, row), *k = K.row(batch, kv_head, key);
    const T *grad = dO.row(batch, head, row), *v = V.row(batch, kv_head, key);
    real product = 0, dP = 0;
    for (int j = threadIdx.x % warp_size; j < d; j += warp_size) product += real(q[j]) * real(k[j]);
    for (int j = threadIdx.x % warp_size; j < dv; j += warp_size) dP += real(grad[j]) * real(v[j]);
    const Extent& of_head = extent_of_head(extent, head);
    const auto [score, slope] = scorer.with_slope(warp_sum(product), of_head, row, key);
    const real p = weight_of(score, own.lse);
    const real kept_dP = of_head.dropped(warp_sum(dP), row, key);
    return {of_head.dropped(p, row, key), score_gradient(p, kept_dP - own.delta, slope)};
  }
};
