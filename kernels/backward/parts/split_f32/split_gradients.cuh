#pragma once
// Computes P and dS as split operands (split_pair.cuh), in mma.cuh or wgmma fragments. In each tile
// every fragment row is scaled by a power of two. Rows with inaccurate sums are flagged.

#include <attention/score.cuh>
#include <attention/dropped_weights.cuh>
#include <attention/tile_pair.cuh>
#include <backward/parts/split_f32/split_row_stats.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

// Positions of a lane's scores in a tile. for_each() calls body(i, j, e, down, across) for each
// S[i][j][e], which is `down` rows and `across` keys after the lane's first score. If `of_keys` is
// set, the rows of fragments are keys.
template <bool of_keys>
struct OwnScores {
  int row, key;

  template <int m, int n, class Body>
  __device__ __forceinline__ void for_each(float (&S)[m][n][4], Body body) const {
#pragma unroll
    for (int i = 0; i < 2 * m; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * n; ++j) {
        const int down = i * 8, across = j / 2 * 8 + j % 2;
        body(i / 2, j / 2, i % 2 * 2 + j % 2, of_keys ? across : down, of_keys ? down : across);
      }
    }
  }
};

// Multiplies fragment elements by the `unit` of their Q row.
template <auto unit, bool of_keys, int m, int n, int rows>
__device__ __forceinline__ void multiply_units(float (&numbers)[m][n][4],
                                               const SplitStats (&stats)[rows],
                                               const OwnScores<of_keys>& own) {
  own.for_each(numbers, [&](int i, int j, int e, int down, int) {
    numbers[i][j][e] *= stats[own.row + down].*unit;
  });
}

// Replaces S with P = 2^(S * unit - lse2), or with 0 where masked or dropped. Sets PS to P before
// dropout, times the derivative of the score modification. hides: mask expressions may hide pairs.
template <bool masked, bool hides, bool of_keys, int m, int n, int rows, int keys>
__device__ __forceinline__ void compute_P_if(float (&S)[m][n][4], float (&PS)[m][n][4],
                                             const SplitStats (&stats)[rows],
                                             const OwnScores<of_keys>& own,
                                             const TilePair<rows, keys>& pair,
                                             const Scorer<float>& scorer) {
  own.for_each(S, [&](int i, int j, int e, int down, int across) {
    float& x = S[i][j][e];
    const float lse2 = stats[own.row + down].lse2, unit = stats[own.row + down].unit;
    const Index query = pair.template row<masked>(own.row, down);
    const Index key = pair.template key<masked>(own.key, across);
    Scored<float> scored = {x * unit, 1.0f};
    if constexpr (has_score_mod)
      scored = scorer.exponent_with_slope<caps_tiles>(caps_tiles ? x : x * unit, pair.extent, query,
                                                      key);
    x = exp2f(scored.score - lse2);
    if (masked && !pair.in_reach(own.row + down, own.key + across)) x = 0;
    if (hides && pair.extent.hides(query, key)) x = 0;
    PS[i][j][e] = score_gradient(x, 1.0f, scored.slope);
  });
  const int row = pair.first_row + own.row, key = pair.first_key + own.key;
  if constexpr (has_dropout && of_keys)
    mark_transposed(reinterpret_cast<float (&)[m * n * 4]>(PS), pair.extent, row, key);
  else
    mark(PS, pair.extent, row, key);
  drop_marked(S, PS);
  if constexpr (has_dropout && !unit_slope)  // with unit slopes, NaN counts as kept
    own.for_each(S, [&](int i, int j, int e, int, int) {
      if (isnan(PS[i][j][e])) S[i][j][e] = PS[i][j][e];
    });
}
template <bool masked, bool of_keys, int m, int n, int rows, int keys>
__device__ __forceinline__ void compute_P(float (&S)[m][n][4], float (&PS)[m][n][4],
                                          const SplitStats (&stats)[rows],
                                          const OwnScores<of_keys>& own,
                                          const TilePair<rows, keys>& pair,
                                          const Scorer<float>& scorer) {
  const timeline::Phase phase(timeline::softmax, m * n * 4);
  if constexpr (caps_tiles) multiply_units<&SplitStats::unit>(S, stats, own);
  pair.extent.cap(reinterpret_cast<float (&)[m * n * 4]>(S), scorer.scale);
  if (pair.is_full())
    compute_P_if<masked, false>(S, PS, stats, own, pair, scorer);
  else
    compute_P_if<masked, true>(S, PS, stats, own, pair, scorer);
}

// Replaces the split product dP with the unscaled dS, times 2^60: PS * (dP - delta) * 2^60.
template <bool of_keys, int m, int n, int rows>
__device__ __forceinline__ void compute_dS(float (&dP)[m][n][4], const float (&PS)[m][n][4],
                                           const SplitStats (&stats)[rows],
                                           const OwnScores<of_keys>& own, float factor) {
  const timeline::Phase phase(timeline::softmax, m * n * 4);
  own.for_each(dP, [&](int i, int j, int e, int down, int) {
    const float unit = stats[own.row + down].dO_unit, delta = stats[own.row + down].delta;
    dP[i][j][e] = weighted_gradient(PS[i][j][e], dP[i][j][e] * unit, delta, factor);
  });
}

// Running maxima of the weights in a lane's fragment rows.
template <int m>
struct Largest {
  static constexpr int least = -112;  // smallest exponent for which 2^(14 - least) is finite
  static constexpr float least_weight = 0x1p-112f;  // parts of smaller ones are less accurate
  float weight[m][2] = {};

  // Scales each fragment row so that its largest weight is in 2^14 … 2^15; `factor` undoes this.
  template <int n>
  __device__ __forceinline__ void raise(float (&weights)[m][n][4], float (&factor)[m][2]) {
#pragma unroll
    for (int i = 0; i < 2 * m; ++i) {
      float largest = 0;
#pragma unroll
      for (int j = 0; j < 2 * n; ++j)
        largest = fmax(largest, fabs(weights[i / 2][j / 2][i % 2 * 2 + j % 2]));
      largest = fmax(largest, __shfl_xor_sync(full_warp, largest, 1));
      largest = fmax(largest, __shfl_xor_sync(full_warp, largest, 2));
      weight[i / 2][i % 2] = fmax(weight[i / 2][i % 2], largest);
      const int power = split_exponent - max(exponent_of(largest), least);
      factor[i / 2][i % 2] = two_to(-power);
#pragma unroll
      for (int j = 0; j < 2 * n; ++j) weights[i / 2][j / 2][i % 2 * 2 + j % 2] *= two_to(power);
    }
  }

  // Returns the smallest accurate sum of a row. Below it the errors of low halves, 2^-36 of each of
  // two factors below 2^15, may exceed float rounding. Without weights all sums are 0.
  __device__ __forceinline__ float least_sum(int i, int half) const {
    const float largest = weight[i][half];
    return largest == 0 ? 0 : fmax(largest, least_weight) * (0x1p-25f * 0x1p15f);
  }
};

// Returns, to all lanes of a fragment row, whether the row has inaccurate sums: NaN, infinity, and
// sums below `least` with is_inaccurate(col). The columns begin at first_col.
template <int cols, int m, int n, class IsInaccurate>
__device__ __forceinline__ bool is_wrong(const float (&sums)[m][n][4], int i, int half, float least,
                                         int lane, IsInaccurate is_inaccurate, int first_col = 0) {
  static_assert(2 * n <= 64, "one bit per column of a lane");
  bool wrong = false, small = false;
  const auto at = [&](int j) { return fabs(sums[i][j / 2][half * 2 + j % 2]); };
  const auto column = [&](int j) { return first_col + j / 2 * 8 + 2 * (lane % 4) + j % 2; };
#pragma unroll
  for (int j = 0; j < 2 * n; ++j) {
    wrong |= !(at(j) < infinity) && column(j) < cols;
    small |= !(at(j) >= least && at(j) < infinity) && column(j) < cols;
  }
  if (small && !wrong) {  // rare; a rolled loop inlines is_inaccurate() only once
    unsigned long long smalls = 0;
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) smalls |= (unsigned long long)(at(j) < least) << j;
#pragma unroll 1
    for (int j = 0; smalls != 0 && !wrong; ++j, smalls >>= 1)
      wrong = smalls % 2 != 0 && column(j) < cols && is_inaccurate(column(j));
  }
  wrong |= __shfl_xor_sync(full_warp, int(wrong), 1) != 0;
  wrong |= __shfl_xor_sync(full_warp, int(wrong), 2) != 0;
  return wrong;
}

// Stores rows of a gradient: sums times factor * 2^power(column), in pairs where rows are aligned.
template <int cols, int m, int n, class Power>
__device__ __forceinline__ void store_scaled(const float (&sums)[m][n][4], float factor,
                                             Tensor<result> gradient, int batch, int head,
                                             int first, int end, int lane, Power power,
                                             int first_col = 0) {
  const bool in_pairs = cols % 2 == 0 && sizeof(result) == 4 && is_aligned(gradient);
#pragma unroll
  for (int i = 0; i < 2 * m * n; ++i) {
    const int row = first + i % (2 * m) * 8 + lane / 4;
    const int col = first_col + i / (2 * m) * 8 + 2 * (lane % 4);
    if (row >= end || col >= cols) continue;
    const auto scaled = [&](int k) {
      const int all = power(col + k), half = all >> 1;
      const float x = sums[i % (2 * m) / 2][i / (2 * m)][i % 2 * 2 + k];
      return x * two_to(half) * two_to(all - half) * factor;
    };
    result* to = gradient.row(batch, head, row) + col;
    if (in_pairs)
      *reinterpret_cast<float2*>(to) = {scaled(0), scaled(1)};
    else
      for (int k = 0; k < 2 && col + k < cols; ++k) to[k] = scaled(k);
  }
}
