#pragma once
// Softmax of transposed score tiles: a block owns Bc keys and loops over tiles of Br rows. In each
// tile a thread holds two keys, and two of every 8 rows.

#include <attention/no_bias.cuh>
#include <attention/dropped_weights.cuh>
#include <attention/tile_pair.cuh>
#include <backward/parts/gradient_warpgroups.cuh>
#include <backward/parts/keep_dS.cuh>
#include <backward/parts/key_tile.cuh>
#include <backward/parts/repair_keys.cuh>
#include <backward/parts/row_sums.cuh>
#include <backward/parts/sees_distance.cuh>
#include <backward/parts/store_gradient.cuh>
#include <ptx/opaque.cuh>
#include <ptx/wgmma.cuh>
#include <timeline.cuh>

// Returns whether a causal mask, a window or the end of the keys hides any pair of the tile.
template <int Br, int Bc>
__device__ __forceinline__ bool is_masked(const TilePair<Br, Bc>& pair) {
  return pair.first_key + Bc > pair.extent.N || !pair.reaches_all();
}

struct NothingBetween {
  __device__ __forceinline__ void operator()() const {}
};

// Positions of a thread's scores in a tile: the first of its two keys, and the first of its two
// rows in every 8. `rows` is opaque, so that loops keep the addresses of row-sum loads in
// registers. Indices are divided as unsigned integers, which takes fewer instructions.
struct KeyRows {
  int warpgroup, warp, lane, rows;

  __device__ __forceinline__ KeyRows(int warpgroup)
      : warpgroup(warpgroup),
        warp(threadIdx.x / warp_size % 4),
        lane(threadIdx.x % warp_size),
        rows(opaque(int(2 * (threadIdx.x % 4)))) {}

  __device__ __forceinline__ int first_key() const {
    return opaque(warpgroup * warpgroup_rows + warp * step);
  }
  __device__ __forceinline__ int key() const { return first_key() + unsigned(opaque(lane)) / 4; }
  __device__ __forceinline__ int row() const { return rows; }

  // Waits for the products, replaces S^T with P^T and dP^T with the unscaled dS^T. Derivatives of a
  // score modification are multiplied into dP to save registers. Once the bias is read, the bias of
  // the tile at next_row is copied. If `masks` is false, no pair may be masked by position. If
  // `overlaps` is true, dP may be in flight while P is computed; between() is called after P.
  template <bool masks = true, bool overlaps = true, int Br, int Bc, class StoredSums,
            class Bias = const NoBias&, class Between = NothingBetween>
  __device__ __forceinline__ void compute_P_and_dS(Sums<Br>& S, Sums<Br>& dP,
                                                   const StoredSums& sums,
                                                   const Scorer<float>& scorer,
                                                   const TilePair<Br, Bc>& pair,
                                                   Bias&& bias = no_bias, int next_row = -1,
                                                   Between between = {}) const {
    wgmma_wait_group<overlaps ? 1 : 0>(S);
    bias.complete();
    if constexpr (unit_slope || has_dropout) {
      Sums<Br> PS;
      compute_P<masks>(S, PS, sums, scorer, pair, bias);
      bias.load(pair, next_row, first_key());
      between();
      wgmma_wait_group<0>(dP);
      compute_dS(PS, dP, sums, pair.extent.kept_factor());
      drop_marked(S, PS);
    } else {
      wgmma_wait_group<0>(dP);
      Sums<Br> ones;
      for (float& x : ones) x = 1;
      compute_dS(ones, dP, sums, 1.0f);
      weigh<masks>(S, dP, sums, scorer, pair, bias);
      bias.load(pair, next_row, first_key());
    }
  }

  // Replaces S^T with P^T = 2^(S^T * scale2 - lse2). Sets PS^T to P^T times the score's derivative.
  template <bool masks = true, int Br, int Bc, class StoredSums, class Bias = const NoBias&>
  __device__ __forceinline__ void compute_P(Sums<Br>& S, Sums<Br>& PS, const StoredSums& sums,
                                            const Scorer<float>& scorer,
                                            const TilePair<Br, Bc>& pair,
                                            Bias&& bias = no_bias) const {
    for (float& x : PS) x = 1;
    weigh<masks>(S, PS, sums, scorer, pair, bias);
    if constexpr (has_dropout)
      mark_transposed(PS, pair.extent, pair.first_row + row(), pair.first_key + key());
  }
  // Replaces S with P. Multiplies `factors` by P and the derivative of the score modification.
  template <bool masks, int Br, int Bc, class StoredSums, class Bias>
  __device__ __forceinline__ void weigh(Sums<Br>& S, Sums<Br>& factors, const StoredSums& sums,
                                        const Scorer<float>& scorer, const TilePair<Br, Bc>& pair,
                                        Bias&& bias) const {
    const timeline::Phase phase(timeline::softmax, Br / 2);
    pair.extent.cap(S, scorer.scale);
    if (reads_places && !pair.is_whole())
      exponentiate<true, true>(S, factors, sums, scorer, pair, bias);
    else if (pair.is_full())
      exponentiate<false, false>(S, factors, sums, scorer, pair, bias);
    else
      exponentiate<false, true>(S, factors, sums, scorer, pair, bias);
    if (masks && is_masked(pair)) mask(S, pair);
#pragma unroll
    for (int i = 0; i < Br / 2; ++i) factors[i] = score_gradient(S[i], 1.0f, factors[i]);
  }
  template <bool at_end, bool hides, int Br, int Bc, class StoredSums, class Bias>
  __device__ __forceinline__ void exponentiate(Sums<Br>& S, Sums<Br>& factors,
                                               const StoredSums& sums, const Scorer<float>& scorer,
                                               const TilePair<Br, Bc>& pair, Bias&& bias) const {
    const int own_row = reads_places ? row() : 0, own_key = reads_places ? key() : 0;
    decltype(bias.part(0)) part;
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
      if (n % 2 == 0) part = bias.part(n);
      const float2 lse2 = *reinterpret_cast<const float2*>(&sums.lse2[n * 8 + row()]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Index query = pair.template row<at_end>(own_row, n * 8 + e % 2);
        const Index own = pair.template key<at_end>(own_key, e / 2 * 8);
        const auto key = bias.index(own, part, e / 2, n, e % 2 != 0);
        const auto [exponent, slope] =
            scorer.exponent_with_slope<caps_tiles>(S[n * 4 + e], pair.extent, query, key);
        S[n * 4 + e] = exp2f(exponent - (e % 2 ? lse2.y : lse2.x));
        if (hides && pair.extent.hides(query, key)) S[n * 4 + e] = 0;
        factors[n * 4 + e] *= slope;
      }
    }
  }

  // Sets P of masked pairs to 0. The mask depends only on the distance of the key from the row, so
  // it is cheaper than calling Extent::sees for every pair.
  template <int Br, int Bc>
  __device__ __forceinline__ void mask(Sums<Br>& P, const TilePair<Br, Bc>& pair) const {
    const Extent& extent = pair.extent;
    const int first = pair.first_key + key(), distance = first - pair.first_row - row();
#pragma unroll
    for (int i = 0; i < Br / 2; ++i) {
      const int more = i / 2 % 2 * 8, down = i / 4 * 8 + i % 2;
      const bool seen = first + more < extent.N && sees_distance(extent, distance + more - down);
      if (!seen) P[i] = 0;
    }
  }

  // Replaces dP^T with the unscaled dS^T = PS^T * (dP^T - delta).
  template <int count, class StoredSums>
  __device__ __forceinline__ void compute_dS(const float (&PS)[count], float (&dP)[count],
                                             const StoredSums& sums, float factor) const {
    const timeline::Phase phase(timeline::softmax, count);
#pragma unroll
    for (int n = 0; n < count / 4; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(&sums.delta[n * 8 + row()]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dP[n * 4 + e] =
            weighted_gradient(PS[n * 4 + e], dP[n * 4 + e], e % 2 ? delta.y : delta.x, factor);
    }
  }
};

// Stores dK or dV of the warp's 16 keys, or recomputes them if they are not finite.
template <bool of_V, int count, class Task, int d, int dv, class Stats>
__device__ __forceinline__ void store_or_repair(const float (&sums)[count], Tensor<result> gradient,
                                                const KeyRows& own, const Task& task,
                                                const Repair<d, dv, scalar, Stats>& repair) {
  const timeline::Phase phase(timeline::epilogue);
  const int first = task.first_key + own.first_key();
  if (all_finite(fragments(sums)))
    store_gradient<of_V ? dv : d>(fragments(sums),
                                  of_V ? task.extent.kept_factor() : repair.scorer.scale, gradient,
                                  task.batch, task.kv_head, first, task.extent.N, own.lane);
  else
    repair_keys<of_V, of_V ? dv : d>(repair, gradient, task.group, first, first + step, 0);
}
