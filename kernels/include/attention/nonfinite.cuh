#pragma once
// Rows that come out wrong are computed again, one score after the other. That is rare, and keeps
// the products simple: they take all keys of a tile. Two things make a row wrong:
//  - A hidden key's P is 0, but 0 * NaN and 0 * infinity are NaN: its V gets into O.
//  - S * scale2 - maximum is rounded once. For the largest score it is not 0 but the rounding error
//    of the maximum, which above 2^26 is more than 2, and 2 to the power of it may overflow.

#include <attention/repair_row.cuh>
#include <attention/row_state.cuh>

// Whether the scores of one of the lane's rows were too large. A row that sees no key has the
// lowest maximum and is right.
template <int Wr, int pack_gqa>
__device__ __forceinline__ bool overflows(const Rows<Wr, pack_gqa>& rows) {
  bool wrong = false;
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const int query = rows.row(i / 2, i % 2) / pack_gqa;
    const bool sees_key = !has_mask || rows.extent.kv_begin(query) < rows.extent.kv_end(query);
    wrong |= !(rows.sum[i / 2][i % 2] < infinity);
    wrong |= sees_key && is_huge(rows.maximum[i / 2][i % 2]);
  }
  return wrong;
}

template <int m, int n>
__device__ __forceinline__ bool has_nan(const float (&O)[m][n][4]) {
  bool nan = false;
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) {
    const float o = O[i / (4 * n)][i / 4 % n][i % 4];
    nan |= o != o;
  }
  return nan;
}

// Whether a row of the warp is to be computed again. Without a mask no key is hidden.
template <int m, int n, int pack_gqa>
__device__ __forceinline__ bool needs_repair(const float (&O)[m][n][4],
                                             const Rows<m * step, pack_gqa>& rows) {
  return __any_sync(full_warp, overflows(rows) || (has_mask && has_nan(O)));
}

// The same for all rows of a warp.
template <int d, int dv, bool by_call = false, int Wr, int pack_gqa, class T, class Scores>
__device__ void repair_rows(Tensor<const T> Q, Tensor<const T> K, Tensor<const T> V,
                            Tensor<scalar> O, Tensor<real> lse, const Rows<Wr, pack_gqa>& rows,
                            int batch, int head, int kv_head, const Scores& scorer) {
  const int first = __shfl_sync(full_warp, rows.first, 0);
  for (int row = first; row < min(first + Wr, rows.extent.M * pack_gqa); ++row) {
    const int query = row / pack_gqa, own_head = head * pack_gqa + row % pack_gqa;
    const T* q = Q.row(batch, own_head, query);
    scalar* out = O.row(batch, own_head, query);
    real* row_lse = lse.row(batch, own_head, query);
    if constexpr (by_call)
      call_repair_row<d, dv>(q, K, V, out, row_lse, rows.extent, query, batch, kv_head, scorer);
    else
      repair_row<d, dv>(q, K, V, out, row_lse, rows.extent, query, batch, kv_head, scorer);
  }
}
