#pragma once
// Recomputes gradients that are infinite or NaN. A masked pair has P = 0, but 0 * NaN is
// NaN, and P or dS may overflow 16 bits. Both are rare, so the main loop multiplies all pairs of a
// tile; a warp with non-finite accumulators recomputes its rows or keys unrounded, from visible
// pairs only. Rows with a huge lse are recomputed, too (row_stats.cuh).

#include <attention/score.cuh>
#include <attention/dropped_weights.cuh>
#include <backward/parts/all_finite.cuh>
#include <backward/parts/row_range.cuh>
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

  // Recomputes dQ for rows `first` … `end` - 1, at most `width` columns from `col`, below col_end.
  template <int width>
  __device__ void rows(Tensor<result> dQ, int head, int first, int end, int col,
                       int col_end = d) const {
    for (int row = first; row < min(end, extent.M); ++row) {
      const RawStats own = stats(head, row);
      RowSum<width> sum(col, min(d, col_end));
      const int last = own.lse != -infinity ? extent.kv_end(row) : 0;
      for (int key = extent.kv_begin(row); key < last; ++key)
        if (extent_of_head(extent, head).shown(row, key))
          sum.add(pair(head, row, key, own).dS, K.row(batch, kv_head, key));
      sum.store(dQ.row(batch, head, row), scorer.scale);
    }
  }

  // Recomputes dK or dV for keys `first` … `end` - 1, summed over the `group` query heads.
  template <bool of_V, int width>
  __device__ void keys(Tensor<result> gradient, int group, int first, int end,
                       int first_col) const {
    for (int key = first; key < min(end, extent.N); ++key) {
      RowSum<width> sum(first_col, of_V ? dv : d);
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int row = row_begin(extent, key); row < row_end(extent, key, 1); ++row) {
          const RawStats own = stats(head, row);
          if (own.lse == -infinity || !extent_of_head(extent, head).sees(row, key)) continue;
          const Pair made = pair(head, row, key, own);
          sum.add(of_V ? made.p : made.dS, (of_V ? dO : Q).row(batch, head, row));
        }
      }
      sum.store(gradient.row(batch, kv_head, key), of_V ? real(1) : scorer.scale);
    }
  }
};
