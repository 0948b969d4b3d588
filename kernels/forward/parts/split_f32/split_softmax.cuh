#pragma once
// The softmax between two products of split float32 operands (split_pair.cuh).

#include <attention/no_bias.cuh>
#include <attention/row_maxima.cuh>
#include <attention/score.cuh>
#include <forward/parts/split_f32/split_pair.cuh>
#include <timeline.cuh>

constexpr int weight_exponent = 15;  // exponent of a row's largest weight in each tile

// A warp's rows. A product times its row's unit is a score as an exponent of two. Each stored
// maximum is the row's largest score minus 15, so that the largest weight is 2^15.
template <int Wr, int pack_gqa>
struct SplitRows : Rows<Wr, pack_gqa> {
  real units[Wr / step][2];

  __device__ __forceinline__ SplitRows(int first, const Extent& extent, real scale2,
                                       bool takes_sink = true)
      : Rows<Wr, pack_gqa>(first, extent, scale2, takes_sink) {
    move_maxima(-weight_exponent);
  }
  __device__ __forceinline__ void move_maxima(real by) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) this->maximum[i / 2][i % 2] += by;
  }
  // Reads the rows' units; a row past the end gets the unit of the last row.
  __device__ __forceinline__ void read_units(Tensor<const real> from, int batch, int head) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) {
      const int row = this->existing(i / 2, i % 2);
      units[i / 2][i % 2] = *from.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa);
    }
  }
};

// Applies the scorer to the products S. With score_mod, multiplies S by the rows' units first.
template <class T, int m, int n, int pack_gqa, class Bias = NoBias>
__device__ __forceinline__ void apply_scorer(const Scorer<T>& scorer, float (&S)[m][n][4],
                                             const SplitRows<m * step, pack_gqa>& rows,
                                             int first_key, bool is_full, const Bias& bias = {}) {
  if constexpr (has_score_mod) {
#pragma unroll
    for (int i = 0; i < m * n * 4; ++i)
      S[i / (4 * n)][i / 4 % n][i % 4] *= rows.units[i / (4 * n)][i % 4 / 2];
  }
  scorer.apply(S, rows, first_key, is_full, bias);
}

// Turns S into P = 2^(S * unit - origin), at most 2^15 in each row. P is relative to the maximum of
// this tile rather than the running maximum, so that small weights keep their precision. Rescales
// O and the row sums, and sets `weight`, by which the tile's P V has to be multiplied.
template <bool masked, int m, int n, int cols, int pack_gqa>
__device__ __forceinline__ void weigh(float (&S)[m][n][4], float (&O)[m][cols][4],
                                      SplitRows<m * step, pack_gqa>& rows, int first_key, int lane,
                                      float (&weight)[m][2]) {
  const timeline::Phase phase(timeline::softmax, m * n * 4);
  float maximum[m][2], factor[m][2], unit[m][2], sum[m][2] = {};
  find_maxima<masked>(S, rows, first_key, lane, maximum);
  bool risen = false;
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    float& origin = maximum[i / 2][i % 2];
    unit[i / 2][i % 2] = has_score_mod ? rows.scale2 : rows.units[i / 2][i % 2];
    rows.raise_row_max_to(i, origin, unit[i / 2][i % 2]);
    const float least = has_expressions && origin != -infinity ? -largest / 2 : -largest;
    origin = fmax(fmaf(origin, unit[i / 2][i % 2], -float(weight_exponent)), least);
    const float before = rows.maximum[i / 2][i % 2], now = fmax(before, origin);
    factor[i / 2][i % 2] = exp2f(before - now);
    weight[i / 2][i % 2] = exp2f(origin - now) * (1.0f / (1 << weight_exponent));
    risen |= now != before;
    rows.maximum[i / 2][i % 2] = now;
  }
  if (__any_sync(full_warp, risen)) {
    rows.scale(factor);
    scale_rows(O, factor);
  }
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) {
    const int row = i / (4 * n), half = i % 4 / 2;
    float& x = S[row][i / 4 % n][i % 4];
    x = exp2f(fmaf(x, unit[row][half], -maximum[row][half]));
    sum[row][half] += x;
  }
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) sum[i / 2][i % 2] *= weight[i / 2][i % 2];
  rows.add(sum);
  for_dropped(S, 0, n / 2, rows, first_key, [&](int i, int j, int e) { S[i][j][e] = 0; });
}
