#pragma once
// The online softmax of a warp's rows.

#include <attention/row_maxima.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

// Masks a tile of scores and updates the row maxima. Sets the factors that rescale earlier sums;
// returns whether any factor in the warp is not 1. A maximum stays if scores exceed it by at most
// `slack`: P is at most 2^slack. If `whole`, maxima are integers and factors exact powers of two.
template <bool masked, bool whole = false, int m, int n, int pack_gqa>
__device__ __forceinline__ bool raise_maxima(real (&S)[m][n][4], Rows<m * step, pack_gqa>& rows,
                                             int first_key, int lane, real (&factor)[m][2],
                                             real slack = 0) {
  const timeline::Phase phase(timeline::softmax, m * n * 4);
  real maximum[m][2];
  find_maxima<masked>(S, rows, first_key, lane, maximum);
  bool risen = false;
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    rows.raise_row_max_to(i, maximum[i / 2][i % 2], rows.scale2);
    const real before = rows.maximum[i / 2][i % 2];
    real now = fmax(before, rows.exponent_of(maximum[i / 2][i % 2]));
    if (slack > 0 && now <= before + slack) now = before;
    if (whole) now = ceil(now);
    factor[i / 2][i % 2] = exp2f(before - now);
    risen |= now != before;
    rows.maximum[i / 2][i % 2] = now;
  }
  return __any_sync(full_warp, risen);
}

// Masks a tile of scores and updates the row maxima. If a maximum rises, rescales O and the sums.
template <bool masked, int m, int keys, int cols, int pack_gqa>
__device__ __forceinline__ void rescale(real (&S)[m][keys][4], real (&O)[m][cols][4],
                                        Rows<m * step, pack_gqa>& rows, int first_key, int lane) {
  real factor[m][2];
  if (!raise_maxima<masked>(S, rows, first_key, lane, factor)) return;
  rows.scale(factor);
  scale_rows(O, factor);
}

// Computes P = 2^(S * scale2 - maximum) for the 8 keys of fragment column j, and its row sums.
template <int m, int n, int pack_gqa>
__device__ __forceinline__ void exponentiate(real (&S)[m][n][4], int j,
                                             const Rows<m * step, pack_gqa>& rows,
                                             real (&sum)[m][2]) {
#pragma unroll
  for (int i = 0; i < m * 4; ++i) {
    real& x = S[i / 4][j][i % 4];
    x = exp2f(x * rows.scale2 - rows.maximum[i / 4][i % 4 / 2]);
    sum[i / 4][i % 4 / 2] += x;
  }
}

// Computes P for a tile, and applies dropout unless callers apply it to packed operands. The sum
// of a tile is computed separately, then added to the row sums, to limit rounding errors.
template <bool drops = true, int m, int n, int pack_gqa>
__device__ __forceinline__ void exponentiate(real (&S)[m][n][4], Rows<m * step, pack_gqa>& rows,
                                             int first_key) {
  const timeline::Phase phase(timeline::softmax, m * n * 4);
  real sum[m][2] = {};
#pragma unroll
  for (int j = 0; j < n; ++j) exponentiate(S, j, rows, sum);
  rows.add(sum);
  if constexpr (drops)
    for_dropped(S, 0, n / 2, rows, first_key, [&](int i, int j, int e) { S[i][j][e] = 0; });
}
