#pragma once
// The online softmax of a warp's rows together with its derivative. S_dot is the derivative of S
// along the direction: without an expression scale * (Q_dot K^T + Q K_dot^T).

#include <attention/row_softmax.cuh>
#include <attention/score.cuh>

constexpr bool moves_scores = moves_q || moves_k;

// A warp's 16 rows, with the sums of P S_dot over their keys. As sums of P, a lane's sums are
// partial until the end.
struct TangentRows : Rows<step> {
  real sum_dot[1][2] = {};

  using Rows<step>::Rows;

  __device__ __forceinline__ void scale(const real (&factor)[1][2]) {
    Rows<step>::scale(factor);
    for (int i = 0; i < 2; ++i) sum_dot[0][i] *= factor[0][i];
  }
};

// Converts products to scores, as Scorer::apply() does, and multiplies S_dot by the derivative of
// the score modification.
template <int n>
__device__ __forceinline__ void apply_with_slopes(const Scorer<real>& scorer, real (&S)[1][n][4],
                                                  real (&S_dot)[1][n][4], const TangentRows& rows,
                                                  int first_key, bool is_full) {
  if constexpr (unit_slope) return scorer.apply(S, rows, first_key, is_full);
  const int own_key = first_key + 2 * (threadIdx.x % warp_size % 4);
  rows.extent.cap(reinterpret_cast<real(&)[n * 4]>(S), scorer.scale);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Index query = rows.existing(0, i);
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      const int e = i * 2 + j % 2;
      const Index key = index_of<true>(own_key, j / 2 * 8 + j % 2, rows.extent.N);
      const auto [score, slope] =
          scorer.template with_slope<caps_tiles>(S[0][j / 2][e], rows.extent, query, key);
      S[0][j / 2][e] = rows.extent.hides(query, key) ? real(-infinity) : score;
      S_dot[0][j / 2][e] = score_gradient(slope, S_dot[0][j / 2][e], real(1));
    }
  }
}

// Masks a tile of scores and updates the row maxima. If a maximum rises, rescales the sums, O and
// O_dot. The maximum stays if scores exceed it by at most `slack`, as in raise_maxima().
template <bool masked, int keys, int cols>
__device__ __forceinline__ void rescale(real (&S)[1][keys][4], real (&O)[1][cols][4],
                                        real (&O_dot)[1][cols][4], TangentRows& rows, int first_key,
                                        int lane, real slack = 0) {
  real factor[1][2];
  if (!raise_maxima<masked>(S, rows, first_key, lane, factor, slack)) return;
  rows.scale(factor);
  scale_rows(O, factor);
  scale_rows(O_dot, factor);
}

// Replaces S_dot with P_dot = P S_dot in fragment columns `first` to `end` - 1, and adds it to the
// row sums. P is not dropped yet. Like a tile's sum of P, this sum is computed separately.
template <int n>
__device__ __forceinline__ void weigh(const real (&P)[1][n][4], real (&S_dot)[1][n][4], int first,
                                      int end, real scale, TangentRows& rows) {
  const timeline::Phase phase(timeline::softmax, 4 * (end - first));
  real sum_dot[2] = {};
#pragma unroll
  for (int j = first; j < end; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      S_dot[0][j][e] = score_gradient(P[0][j][e], S_dot[0][j][e] * scale, real(1));
      sum_dot[e / 2] += S_dot[0][j][e];
    }
  }
  for (int i = 0; i < 2; ++i) rows.sum_dot[0][i] += sum_dot[i];
}
