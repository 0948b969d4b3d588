#pragma once
// Recomputes rows that the fast path gets wrong, one score at a time. Such rows are rare, so
// products stay simple and include the masked keys of a tile. There are two reasons:
// - P of a masked key is 0, but 0 * NaN and 0 * infinity are NaN, so V of that key leaks into O.
// - S * scale2 - maximum is rounded twice. For the largest score the result may be half an ulp of
//   the maximum, which is 4 from 2^26 on, and P may overflow. Near the ends of the range
//   S * scale2 itself overflows.

#include <attention/row_max.cuh>
#include <attention/row_state.cuh>
#include <attention/score.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

// Returns whether an exponent of two is so large that its rounding error matters.
__device__ __forceinline__ bool is_huge(real exponent) {
  return !(fabs(exponent) < (sizeof(real) == 8 ? real(1ll << 55) : real(1 << 26)));
}

// Returns whether a row's scores are too large, or N is 0. If a row has keys in range but no score,
// an expression has hidden them all; expressions of products hide no keys. `|` saves branches.
__device__ __forceinline__ bool has_overflowed(real maximum, real sum, bool sees_key) {
  const bool may_have_none = (has_expressions && !of_products) || !sees_key;
  const bool has_none = has_context && maximum == -largest && sum == 0 && may_have_none;
  return !(sum < infinity) | (((has_sink || sees_key) && !has_none) & is_huge(maximum));
}

template <int Wr, int pack_gqa>
__device__ __forceinline__ bool overflows(const Rows<Wr, pack_gqa>& rows) {
  bool wrong = false;
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const int query = rows.row(i / 2, i % 2) / pack_gqa;
    const bool sees_key = !has_mask || rows.extent.kv_begin(query) < rows.extent.kv_end(query);
    wrong |= has_overflowed(rows.maximum[i / 2][i % 2], rows.sum[i / 2][i % 2], sees_key);
  }
  return wrong;
}

template <int m, int n>
__device__ __forceinline__ bool has_nan(const real (&O)[m][n][4]) {
  bool nan = false;
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) nan |= isnan(O[i / (4 * n)][i / 4 % n][i % 4]);
  return nan;
}

// Returns whether a row of the warp must be recomputed. NaN in O is suspicious only with a mask;
// without one every key is visible, and NaN in O is correct.
template <int m, int n, int pack_gqa>
__device__ __forceinline__ bool needs_repair(const real (&O)[m][n][4],
                                             const Rows<m * step, pack_gqa>& rows) {
  return __any_sync(full_warp, overflows(rows) || (has_mask && has_nan(O)));
}

// Recomputes a query's row of O and lse with one warp, from its visible keys and the sink. Loop
// conditions do not depend on the lane, so that the compiler sees the warp as converged.
template <int d, int dv, class Queries, class Keys, class Scores>
__device__ void repair_row(Queries Q, Keys K, Keys V, Tensor<result> O, Tensor<real> lse,
                           const Extent& extent, int query, int batch, int head, int kv_head,
                           const Scores& scorer) {
  constexpr int width = dv < 256 ? dv : 256, count = cdiv(width, warp_size);  // columns per pass
  const int lane = threadIdx.x % warp_size;
  const auto q = Q.row(batch, head, query);
  for (int first_col = lane, left = dv; left > 0; left -= width, first_col += width) {
    real maximum = extent.sink(), o[count] = {};
    RowMaxima<1> largest_score;
    real sum = maximum == -infinity ? real(0) : maximum - maximum + 1;  // NaN for an infinite sink
    for (int key = extent.kv_begin(query); key < extent.kv_end(query); ++key) {
      if (!extent.shown(query, key)) continue;
      const auto k = K.row(batch, kv_head, key), v = V.row(batch, kv_head, key) + first_col;
      real product = 0;
      for (int j = lane; j < d; j += warp_size) product += real(q[j]) * real(k[j]);
      const real x = scorer.modified(warp_sum(product), extent, query, key), before = maximum;
      maximum = fmax(maximum, x);
      largest_score.raise_row_max(0, x);
      const real origin = maximum == -infinity ? real(0) : maximum;
      const real factor = exp(before - origin), p = exp(x - origin);
      sum = sum * factor + p;
      const real weight = extent.dropped(p, query, key);
#pragma unroll
      for (int j = 0; j < count; ++j) {
        if (first_col + j * warp_size < dv) o[j] = o[j] * factor + weight * real(v[j * warp_size]);
      }
    }
    const real inverse = sum == 0 ? real(0) : 1 / sum;  // NaN of V stays NaN
    result* out = O.row(batch, head, query) + first_col;
#pragma unroll
    for (int j = 0; j < count; ++j) {
      if (first_col + j * warp_size < dv) out[j * warp_size] = result(o[j] * inverse);
    }
    if (first_col == 0) {
      *lse.row(batch, head, query) = maximum + log(sum);
      write_row_max(extent, query, largest_score.row_max(0), sum);
    }
  }
}

// Calls repair_row() out of line. The main loop has more registers, but a call serialises wgmma.
template <int d, int dv, class... Args>
__device__ __noinline__ void call_repair_row(Args... args) {
  repair_row<d, dv>(args...);
}

template <int d, int dv, bool by_call = false, int Wr, int pack_gqa, class T, class Keys, class S>
__device__ void repair_rows(T Q, Keys K, Keys V, Tensor<result> O, Tensor<real> lse,
                            const Rows<Wr, pack_gqa>& rows, int batch, int head, int kv_head,
                            const S& scorer) {
  const int first = __shfl_sync(full_warp, rows.first, 0);
  for (int row = first; row < min(first + Wr, rows.extent.M * pack_gqa); ++row) {
    const int query = row / pack_gqa, own = head * pack_gqa + row % pack_gqa;
    const Extent& extent = extent_of_head(rows.extent, own);
    if constexpr (by_call)
      call_repair_row<d, dv>(Q, K, V, O, lse, extent, query, batch, own, kv_head, scorer);
    else
      repair_row<d, dv>(Q, K, V, O, lse, extent, query, batch, own, kv_head, scorer);
  }
}
