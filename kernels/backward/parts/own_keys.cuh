#pragma once
// What a block does that owns Bc keys, and goes through tiles of Br rows that lie transposed: a
// thread has two keys of each tile, and of each 8 rows two.

#include <ptx/opaque.cuh>
#include <backward/parts/gradient_warpgroups.cuh>
#include <attention/pairs.cuh>
#include <tile/block_copy.cuh>
#include <tile/tensor.cuh>
#include <backward/parts/recompute_gradients.cuh>

// A block's keys, and the tiles of rows that see some of them, in each head of the group.
struct Work {
  int first_key, kv_head, batch, first_row, end_row, group, M;

  // body(head, first row, number of the tile) for each tile.
  template <class Body>
  __device__ __forceinline__ void for_tiles(int heads, Body body) const {
#pragma unroll 1
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (int row = first_row; row < end_row; row += Br)
        body(head, row, tile_of(batch, head, heads, row, M));
    }
  }
};

__device__ __forceinline__ Work find_work(int M, int N, int kv_heads, int group, int causal_offset,
                                          int window_offset) {
  // With a causal mask the first keys have the most rows.
  const auto [tile, kv_head, batch] = place(blockIdx.x, max(cdiv(N, Bc), 1), kv_heads);
  const auto rows = rows_that_see(tile * Bc, M, N, causal_offset, window_offset);
  return {tile * Bc, kv_head, batch, rows.first / Br * Br, N > 0 ? rows.end : 0, group, M};
}

// Which keys and rows of a tile a thread has: the first of two keys, and of each 8 rows the first.
struct Own {
  int warpgroup, warp, lane;

  __device__ __forceinline__ Own(int warpgroup)
      : warpgroup(warpgroup), warp(threadIdx.x / warp_size % 4), lane(threadIdx.x % warp_size) {}

  __device__ __forceinline__ bool leads() const { return threadIdx.x % warpgroup_size == 0; }
  __device__ __forceinline__ int first_key() const {
    return opaque(warpgroup * warpgroup_rows + warp * step);
  }
  __device__ __forceinline__ int key() const { return first_key() + opaque(lane) / 4; }
  __device__ __forceinline__ int row() const { return 2 * (opaque(lane) % 4); }

  // S^T becomes P^T = 2^(S^T * scale2 - lse2).
  __device__ __forceinline__ void weigh(Sums<Br>& S, const RowSums& sums, float scale2) const {
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
      const float2 lse2 = *reinterpret_cast<const float2*>(&sums.lse2[n * 8 + row()]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S[n * 4 + e] = exp2f(S[n * 4 + e] * scale2 - (e % 2 ? lse2.y : lse2.x));
    }
  }

  // Sets the weights of pairs to 0 that do not count. What of a key and a row decides is how far
  // the key is ahead.
  __device__ __forceinline__ void hide(Sums<Br>& P, const Pairs& pairs) const {
    if (pairs.first_key + Bc <= pairs.N && pairs.all()) return;
    const int first = pairs.first_key + key(), ahead = first - pairs.first_row - row();
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int more = e / 2 * 8, here = ahead + more - (n * 8 + e % 2);
        const bool seen = first + more < pairs.N && (!causal || here <= pairs.causal_offset) &&
                          (!windowed || here >= pairs.window_offset);
        if (!seen) P[n * 4 + e] = 0;
      }
    }
  }

  // dP^T becomes dS^T = P^T * (dP^T - D), without the scale.
  __device__ __forceinline__ void differentiate(const Sums<Br>& P, Sums<Br>& dP,
                                                const RowSums& sums) const {
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(&sums.delta[n * 8 + row()]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dP[n * 4 + e] = P[n * 4 + e] * (dP[n * 4 + e] - (e % 2 ? delta.y : delta.x));
    }
  }
};

// dK and dV of a warp's 16 keys, or one of them, by the rows that see each.
template <bool with_dK = true, bool with_dV = true>
__device__ void recompute_keys(Tensor<const scalar> Q, Tensor<const scalar> K,
                               Tensor<const scalar> V, Tensor<const scalar> dO, Tensor<scalar> dK,
                               Tensor<scalar> dV, const RowSums* row_sums, const Work& work,
                               int first_key, int heads, int N, int causal_offset,
                               int window_offset, float scale) {
  constexpr int d_count = cdiv(d, warp_size), dv_count = cdiv(dv, warp_size);
  const int lane = threadIdx.x % warp_size;
  for (int key = first_key; key < min(first_key + step, N); ++key) {
    const scalar* k = K.row(work.batch, work.kv_head, key);
    const scalar* v = V.row(work.batch, work.kv_head, key);
    float k_sums[d_count] = {}, v_sums[dv_count] = {};
    work.for_tiles(heads, [&](int head, int first_row, long long tile) {
      for (int i = 0; i < min(Br, work.M - first_row); ++i) {
        const int row = first_row + i;
        const RowSums& sums = row_sums[tile];
        if (!sums.counts(i) || !sees_key(row, key, N, causal_offset, window_offset)) continue;
        const scalar* q = Q.row(work.batch, head, row);
        const scalar* grad = dO.row(work.batch, head, row);
        const Pair pair = weigh_pair(q, k, grad, v, sums.lse2[i], sums.delta[i], scale, lane);
#pragma unroll
        for (int j = 0; j < d_count; ++j) {
          const int col = lane + j * warp_size;
          if (with_dK && col < d) k_sums[j] += pair.slope * float(q[col]);
        }
#pragma unroll
        for (int j = 0; j < dv_count; ++j) {
          const int col = lane + j * warp_size;
          if (with_dV && col < dv) v_sums[j] += pair.weight * float(grad[col]);
        }
      }
    });
#pragma unroll
    for (int j = 0; j < d_count; ++j) {
      const int col = lane + j * warp_size;
      if (with_dK && col < d)
        dK.row(work.batch, work.kv_head, key)[col] = scalar(k_sums[j] * scale);
    }
#pragma unroll
    for (int j = 0; j < dv_count; ++j) {
      const int col = lane + j * warp_size;
      if (with_dV && col < dv) dV.row(work.batch, work.kv_head, key)[col] = scalar(v_sums[j]);
    }
  }
}
