// wgmma_two_pass_rows: dQ, of which a block keeps 128 rows and goes through tiles of keys.
//
// S = Q K^T and dP = dO V^T come out as fragments, dS of which is an operand of dQ += dS K where it
// lies: nothing is passed on through shared memory, or added in global memory.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]
//   grid (cdiv(M, 128) * heads * batch)    block (384)
//   the host sets: scalar, real, Br, Bk, stages, d, dv, causal, windowed, threads, shared_bytes
#include <ptx/opaque.cuh>
#include <backward/parts/gradient_warpgroups.cuh>
#include <attention/score.cuh>
#include <backward/parts/repair_gradients.cuh>
#include <tile/shared.cuh>

constexpr int own_rows = consumers * warpgroup_rows;

struct Shared {
  TmaTile<scalar, own_rows, d> Q;
  TmaTile<scalar, own_rows, dv> dO;
  TmaTile<scalar, Bk, d> K[stages];
  TmaTile<scalar, Bk, dv> V[stages];
  Barrier Q_full, dO_full, K_full[stages], V_full[stages], empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bk % step == 0, "tiles are made of whole products");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  init_barrier(shared.Q_full, 1);
  init_barrier(shared.dO_full, 1);
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.K_full[i], 1);
    init_barrier(shared.V_full[i], 1);
    init_barrier(shared.empty[i], consumers);
  }
  fence_barrier_init();
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const RowTile& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        int kv_head) {
  if (work.kv_begin >= work.kv_end) return;
  load_async(shared.Q, Q, shared.Q_full, work.row, work.head, work.batch);
  load_async(shared.dO, dO, shared.dO_full, work.row, work.head, work.batch);
  PipelineState<stages> turn;
#pragma unroll 1  // it has few registers
  for (int first_key = work.kv_begin; first_key < work.kv_end; first_key += Bk, turn.advance()) {
    const int i = turn.stage;
    wait(shared.empty[i], turn.phase ^ 1);
    load_async(shared.K[i], K, shared.K_full[i], first_key, kv_head, work.batch);
    load_async(shared.V[i], V, shared.V_full[i], first_key, kv_head, work.batch);
  }
}

// The two rows that a thread has.
struct OwnRows {
  int first;  // of them
  float lse2[2], delta[2];
};

// S becomes P = 2^(S * scale2 - lse2).
__device__ __forceinline__ void compute_P(Sums<Bk>& S, const OwnRows& rows, float scale2) {
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) S[i] = exp2f(S[i] * scale2 - rows.lse2[i / 2 % 2]);
}

// For modified scores: S becomes P, and `slopes` the slopes.
__device__ __forceinline__ void compute_P_and_slopes(Sums<Bk>& S, Sums<Bk>& slopes,
                                                     const OwnRows& rows,
                                                     const Scorer<float>& scorer) {
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) {
    const auto [score, slope] = scorer.with_slope(S[i]);
    S[i] = exp2f(score * log2e - rows.lse2[i / 2 % 2]);
    slopes[i] = slope;
  }
}

// Sets P of masked pairs to 0. The mask depends only on how far a key is ahead of a row, which is
// why it is written out here: Extent::sees would compare each pair anew.
__device__ __forceinline__ void mask(Sums<Bk>& P, const OwnRows& rows, int first_key,
                                     const Extent& extent) {
  const int key = first_key + 2 * (opaque(int(threadIdx.x)) % 4), ahead = key - opaque(rows.first);
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) {
    const int more = i / 4 * 8 + i % 2, here = ahead + more - i / 2 % 2 * 8;
    const bool seen = key + more < extent.N && (!causal || here <= extent.causal_offset) &&
                      (!windowed || here >= extent.window_offset);
    if (!seen) P[i] = 0;
  }
}

// dP becomes dS = P * (dP - delta), without the scale.
__device__ __forceinline__ void compute_dS(const Sums<Bk>& P, Sums<Bk>& dP, const OwnRows& rows) {
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) dP[i] = P[i] * (dP[i] - rows.delta[i / 2 % 2]);
}

// What a warpgroup of consumers does.
__device__ __forceinline__ void consume(Shared& shared, const RowTile& work, int warpgroup,
                                        const OwnRows& rows, Sums<d_width>& dQ,
                                        const Extent& extent, const Scorer<float>& scorer) {
  if (work.kv_begin >= work.kv_end) return;
  PipelineState<stages> turn;
  wait(shared.Q_full, 0);
  wait(shared.dO_full, 0);
#pragma unroll 1
  for (int first_key = work.kv_begin; first_key < work.kv_end; first_key += Bk, turn.advance()) {
    const int i = turn.stage;
    Sums<Bk> S, dP;
    Operands<Bk> dS;
    wait(shared.K_full[i], turn.phase);
    begin_scores<d_width>(S, shared.Q, shared.K[i], warpgroup);
    wait(shared.V_full[i], turn.phase);
    begin_scores<dv_width>(dP, shared.dO, shared.V[i], warpgroup);
    wgmma_wait_group<1>(S);
    const bool masked = extent.is_masked(work.row, own_rows, first_key, Bk);
    if constexpr (has_score_mod) {
      Sums<Bk> slopes;
      compute_P_and_slopes(S, slopes, rows, scorer);
      if (masked) mask(S, rows, first_key, extent);
      wgmma_wait_group<0>(dP);
#pragma unroll
      for (int j = 0; j < Bk / 2; ++j)
        dP[j] = score_gradient(S[j], dP[j] - rows.delta[j / 2 % 2], slopes[j]);
    } else {
      compute_P(S, rows, scorer.scale * log2e);
      if (masked) mask(S, rows, first_key, extent);
      wgmma_wait_group<0>(dP);
      compute_dS(S, dP, rows);
    }
    pack_operands(dP, dS);
    begin_sums(dQ, dS, shared.K[i]);
    wgmma_wait_group<0>(dQ);
    if (threadIdx.x % warpgroup_size == 0) arrive(shared.empty[i]);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_rows(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums* row_sums, Tensor<scalar> dQ, Sizes sizes, int heads, int group, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const int row_tiles = cdiv(sizes.M, own_rows);
  const auto [tile, head, batch] = place(blockIdx.x, row_tiles, heads);
  const Extent extent = extent_of(sizes, batch);
  const Scorer<float> scorer = {scale, mods};
  // The longest rows of a causal mask first.
  const RowTile work =
      row_tile<own_rows, Bk>(extent, (row_tiles - 1 - tile) * own_rows, head, batch);
  const int kv_head = work.head / group, warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, work, Q_map, K_map, V_map, dO_map, kv_head);
    return;
  }
  take_from_producer();
  const int lane = threadIdx.x % warp_size;
  const int first = work.row + int(threadIdx.x) / warp_size * step - warpgroup_rows;
  OwnRows rows = {first + lane / 4};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.first + half * 8;
    const RowSums* sums = row_sums + tile_of(work.batch, work.head, heads, row, extent.M);
    rows.lse2[half] = row < extent.M ? sums->lse2[row % Br] : infinity;
    rows.delta[half] = row < extent.M ? sums->delta[row % Br] : 0;
  }
  Sums<d_width> sums = {};
  consume(shared, work, warpgroup, rows, sums, extent, scorer);
  if (all_finite(sums)) {
    store_gradient<d>(sums, scale, first, dQ, batch, head, extent.M, lane);
  } else {
    const Repair<d, dv, scalar, StatsOfTiles> repair = {
        extent, Q, K, V, dO, {row_sums, batch, heads, extent.M}, scorer, batch, kv_head};
    repair.rows<d_width>(dQ, head, first, first + step, 0);
  }
}
