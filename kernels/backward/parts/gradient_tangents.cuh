#pragma once
// The derivatives of P and dS along a direction, for one row tile and one key tile.
//
// A kernel's struct Shared holds what gradients.cuh needs, without P, and the tangents Q_dot
// [rows], K_dot and V_dot [keys], lse_dot and delta_dot [rows], and P_dot and dS_dot as PTile<rows,
// keys>.

#include <attention/score.cuh>
#include <attention/weight.cuh>
#include <backward/parts/gradients.cuh>

// Computes dS, dS_dot and, after dropout, P_dot; all are 0 for hidden pairs. dO does not move, and
// expressions only add to scores.
template <int threads, int d, int dv, int rows, int keys, class Shared>
__device__ __forceinline__ void compute_tangents(Shared& shared, const TilePair<rows, keys>& pair,
                                                 const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::arithmetic, rows * keys * (3 * d + 2 * dv) / threads);
  share_out<threads, rows * keys, 1>([&](int i, int) {
    const int row = i % rows, key = i / rows;
    real dot = 0, dot_moved = 0, dP = 0, dP_moved = 0;
#pragma unroll 4
    for (int k = 0; k < d; ++k) {
      const real q = real(shared.Q[row][k]), its_key = real(shared.K[key][k]);
      dot += q * its_key;
      dot_moved += real(shared.Q_dot[row][k]) * its_key + q * real(shared.K_dot[key][k]);
    }
#pragma unroll 4
    for (int k = 0; k < dv; ++k) {
      const real grad = real(shared.dO[row][k]);
      dP += grad * real(shared.V[key][k]);
      dP_moved += grad * real(shared.V_dot[key][k]);
    }
    const bool counts = shared.lse[row] != -infinity && sees(pair, row, key);
    const auto score =
        scorer.with_slope(dot, pair.extent, pair.row(row), pair.template key<true>(key, 0)).score;
    const real p = counts ? weight_of(score, shared.lse[row]) : real(0);
    const real p_dot = counts ? p * (dot_moved * scorer.scale - shared.lse_dot[row]) : real(0);
    const auto dropped = [&](real x) {
      return pair.extent.dropped(x, pair.first_row + row, pair.first_key + key);
    };
    const real apart = dropped(dP) - shared.delta[row];
    const real apart_dot = dropped(dP_moved) - shared.delta_dot[row];
    shared.P_dot[row][key] = dropped(p_dot);
    shared.dS[row][key] = counts ? p * apart : real(0);
    shared.dS_dot[row][key] = counts ? p_dot * apart + p * apart_dot : real(0);
  });
}
