#pragma once
// A block that owns Bc keys and goes through tiles of Br rows, transposed: a thread has two keys of
// each tile, and two of each 8 rows.

#include <backward/parts/gradient_warpgroups.cuh>
#include <backward/parts/repair_gradients.cuh>
#include <backward/parts/row_sums.cuh>
#include <ptx/opaque.cuh>

// A block's keys, and the tiles of rows that see some of them, in each head of the group.
template <int Br, int Bc>
struct KeyTile {
  Extent extent;
  int first_key, kv_head, batch, first_row, end_row, group, heads;

  // body(head, first row, number of the tile) for each tile.
  template <class Body>
  __device__ __forceinline__ void for_tiles(Body body) const {
#pragma unroll 1
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (int row = first_row; row < end_row; row += Br)
        body(head, row, tile_of<Br>(batch, head, heads, row, extent.M));
    }
  }
};

template <int Br, int Bc>
__device__ __forceinline__ KeyTile<Br, Bc> key_tile(const Sizes& sizes, const Mods& mods,
                                                    int kv_heads, int group, int heads) {
  // With a causal mask the first keys have the most rows.
  const auto [tile, kv_head, batch] = place(blockIdx.x, max(cdiv(sizes.N, Bc), 1), kv_heads);
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  const int first_key = tile * Bc, first_row = extent.row_begin(first_key) / Br * Br;
  const int end_row = extent.N > 0 ? extent.row_end(first_key, Bc) : 0;
  return {extent, first_key, kv_head, batch, first_row, end_row, group, heads};
}

// Which keys and rows of a tile a thread has: the first of two keys, and of each 8 rows the first.
struct Own {
  int warpgroup, warp, lane;

  __device__ __forceinline__ Own(int warpgroup)
      : warpgroup(warpgroup), warp(threadIdx.x / warp_size % 4), lane(threadIdx.x % warp_size) {}

  __device__ __forceinline__ int first_key() const {
    return opaque(warpgroup * warpgroup_rows + warp * step);
  }
  __device__ __forceinline__ int key() const { return first_key() + opaque(lane) / 4; }
  __device__ __forceinline__ int row() const { return 2 * (opaque(lane) % 4); }

  // S^T becomes P^T = 2^(S^T * scale2 - lse2), and PS^T is P^T times the slope of the modification.
  template <int Br, int Bc>
  __device__ __forceinline__ void compute_P(Sums<Br>& S, Sums<Br>& PS, const RowSums<Br>& sums,
                                            const Scorer<float>& scorer,
                                            const TilePair<Br, Bc>& pair) const {
    const int own_row = has_texts ? row() : 0, own_key = has_texts ? key() : 0;
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
      const float2 lse2 = *reinterpret_cast<const float2*>(&sums.lse2[n * 8 + row()]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const auto [exponent, slope] = scorer.exponent_with_slope<true>(
            S[n * 4 + e], pair, own_row + n * 8 + e % 2, own_key, e / 2 * 8);
        S[n * 4 + e] = exp2f(exponent - (e % 2 ? lse2.y : lse2.x));
        PS[n * 4 + e] = slope;
      }
    }
    mask(S, pair);
#pragma unroll
    for (int i = 0; i < Br / 2; ++i) PS[i] = score_gradient(S[i], 1.0f, PS[i]);
  }

  // Sets P of masked pairs to 0. The mask depends only on the distance of the key from the row,
  // which Extent::sees would compute for each pair anew.
  template <int Br, int Bc>
  __device__ __forceinline__ void mask(Sums<Br>& P, const TilePair<Br, Bc>& pair) const {
    const Extent& extent = pair.extent;
    if (pair.first_key + Bc <= extent.N && pair.sees_all()) return;
    const int first = pair.first_key + key(), distance = first - pair.first_row - row();
#pragma unroll
    for (int i = 0; i < Br / 2; ++i) {
      const int more = i / 2 % 2 * 8, down = i / 4 * 8 + i % 2;
      const bool seen = first + more < extent.N && extent.sees_distance(distance + more - down);
      if (!seen || !extent.shown(first - distance + down, first + more)) P[i] = 0;
    }
  }

  // dP^T becomes dS^T = PS^T * (dP^T - delta), without the scale.
  template <int Br>
  __device__ __forceinline__ void compute_dS(const Sums<Br>& PS, Sums<Br>& dP,
                                             const RowSums<Br>& sums) const {
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(&sums.delta[n * 8 + row()]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dP[n * 4 + e] = PS[n * 4 + e] * (dP[n * 4 + e] - (e % 2 ? delta.y : delta.x));
    }
  }
};

// Stores the warp's 16 keys of dK or dV, or computes them again if they are not finite.
template <bool of_V, int count, class Task, int d, int dv, class Stats>
__device__ __forceinline__ void store_or_repair(const float (&sums)[count], Tensor<scalar> gradient,
                                                const Own& own, const Task& task,
                                                const Repair<d, dv, scalar, Stats>& repair) {
  const int first = task.first_key + own.first_key();
  if (all_finite(sums))
    store_gradient<of_V ? dv : d>(sums, of_V ? 1.0f : repair.scorer.scale, gradient, task.batch,
                                  task.kv_head, first, task.extent.N, own.lane);
  else
    repair.template keys<of_V, of_V ? dv : d>(gradient, task.group, first, first + step, 0);
}
