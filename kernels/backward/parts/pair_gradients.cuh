#pragma once
// P and dS of a row tile and a key tile, from lse and delta, for the scalar backward kernels.

#include <attention/dropped_weights.cuh>
#include <attention/score.cuh>
#include <attention/weight.cuh>
#include <backward/parts/gradients.cuh>

// Computes P = exp(S - lse) and unscaled dS = P * (dO V^T - delta); both are 0 for hidden pairs.
template <int threads, int d, int dv, int rows, int keys, class Shared>
__device__ __forceinline__ void compute_P_and_dS(Shared& shared, const TilePair<rows, keys>& pair,
                                                 const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::arithmetic, rows * keys * (d + dv) / threads);
  constexpr int count = per_thread(keys);
  const bool is_full = pair.is_full();
  share_out<threads, rows*(keys / count), 1>([&](int i, int) {
    const int row = i % rows, key = i / rows * count;
    real dots[count] = {}, dP[count] = {};
#pragma unroll 4
    for (int k = 0; k < d; ++k) {
      const real q = real(shared.Q[row][k]);
#pragma unroll
      for (int n = 0; n < count; ++n) dots[n] += q * real(shared.K[key + n][k]);
    }
#pragma unroll 4
    for (int k = 0; k < dv; ++k) {
      const real grad = real(shared.dO[row][k]);
#pragma unroll
      for (int n = 0; n < count; ++n) dP[n] += grad * real(shared.V[key + n][k]);
    }
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const bool counts = shared.lse[row] != -infinity &&
                          (is_full ? pair.in_reach(row, key + n) : sees(pair, row, key + n));
      const auto [score, slope] =
          scorer.with_slope(dots[n], pair.extent, pair.row(row), pair.template key<true>(key, n));
      const real p = counts ? weight_of(score, shared.lse[row]) : real(0);
      const int its_row = pair.first_row + row, its_key = pair.first_key + key + n;
      const real kept_dP = pair.extent.dropped(dP[n], its_row, its_key);
      shared.P[row][key + n] = pair.extent.dropped(p, its_row, its_key);
      shared.dS[row][key + n] =
          counts ? score_gradient(p, kept_dP - shared.delta[row], slope) : real(0);
    }
  });
}
