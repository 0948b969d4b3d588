#pragma once
// Computes P and dS in mma.cuh fragments from lse and delta.

#include <attention/score.cuh>
#include <attention/dropped_weights.cuh>
#include <attention/tile_pair.cuh>
#include <backward/parts/stats_in_memory.cuh>
#include <ptx/opaque.cuh>
#include <tile/share_out_rows.cuh>
#include <timeline.cuh>

// Returns whether mask expressions hide a pair of the tiles.
template <bool at_end, int rows, int keys>
__device__ __forceinline__ bool hides_pair(const TilePair<rows, keys>& pair, int row, int key,
                                           int more = 0) {
  return pair.extent.hides(pair.row(row), pair.template key<at_end>(key, more));
}

// Replaces S with P = 2^(S * scale2 - lse2), or with 0 where masked or dropped. Sets PS to P before
// dropout, times the derivative of the score modification. hides: a mask expression may hide pairs.
template <bool masked, bool hides, class Own, int m, int n, int rows, int keys>
__device__ __forceinline__ void compute_P_if(real (&S)[m][n][4], real (&PS)[m][n][4],
                                             const RowStats (&stats)[rows], const Own& own,
                                             TilePair<rows, keys> pair, const Scorer<real>& scorer,
                                             int lane) {
  pair.first_key = opaque(pair.first_key);  // delays the mask arithmetic, which needs registers
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = own.row + i * 8 + lane / 4;
    const real lse2 = stats[row].lse2;
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      real& x = S[i / 2][j / 2][i % 2 * 2 + j % 2];
      const int more = j / 2 * 8 + j % 2, key = own.col + 2 * (lane % 4);
      const auto [exponent, slope] = scorer.exponent_with_slope<masked>(x, pair, row, key, more);
      x = exp2f(exponent - lse2);
      if (masked && !pair.in_reach(row, key + more)) x = 0;
      if (hides && hides_pair<masked>(pair, row, key, more)) x = 0;
      PS[i / 2][j / 2][i % 2 * 2 + j % 2] = score_gradient(x, real(1), slope);
    }
  }
  mark(PS, pair.extent, pair.first_row + own.row + lane / 4,
       pair.first_key + own.col + 2 * (lane % 4));
  drop_marked(S, PS);
}

template <bool masked, class Own, int m, int n, int rows, int keys>
__device__ __forceinline__ void compute_P(real (&S)[m][n][4], real (&PS)[m][n][4],
                                          const RowStats (&stats)[rows], const Own& own,
                                          const TilePair<rows, keys>& pair,
                                          const Scorer<real>& scorer, int lane) {
  const timeline::Phase phase(timeline::softmax, m * n * 4);
  pair.extent.cap(reinterpret_cast<real(&)[m * n * 4]>(S), scorer.scale);
  if (pair.is_full())
    compute_P_if<masked, false>(S, PS, stats, own, pair, scorer, lane);
  else
    compute_P_if<masked, true>(S, PS, stats, own, pair, scorer, lane);
}

// Replaces dP = dO V^T with the unscaled dS = PS * (dP - delta).
template <class Own, int m, int n, int rows>
__device__ __forceinline__ void compute_dS(real (&dP)[m][n][4], const real (&PS)[m][n][4],
                                           const RowStats (&stats)[rows], const Own& own, int lane,
                                           real factor) {
  const timeline::Phase phase(timeline::softmax, m * n * 4);
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const real delta = stats[own.row + i * 8 + lane / 4].delta;
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      real& x = dP[i / 2][j / 2][i % 2 * 2 + j % 2];
      x = weighted_gradient(PS[i / 2][j / 2][i % 2 * 2 + j % 2], x, delta, factor);
    }
  }
}

// Loads the RowStats of a tile into registers and later stores them in shared memory.
template <int threads, int rows>
struct RowLoads {
  RowStats stats[cdiv(rows, threads)];

  __device__ __forceinline__ void load(const StatsInMemory& from, int head, int first_row, int M) {
    share_out_rows<threads, rows, 1>([&](int i, int, int turn) {
      stats[turn] = row_stats(first_row + i < M ? from(head, first_row + i) : RawStats{-infinity});
    });
  }
  __device__ __forceinline__ void store(RowStats (&to)[rows]) const {
    share_out_rows<threads, rows, 1>([&](int i, int, int turn) { to[i] = stats[turn]; });
  }
};
