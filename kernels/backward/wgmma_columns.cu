// wgmma_columns: `columns` on Hopper's tensor cores. Warpgroups own 64 keys each, one warp loads
// for all with TMA, and others add to dQ, which nobody else waits for.
//
// Scores are computed transposed, S^T = K Q^T: in that form P^T and dS^T are operands in registers
// of dV += P^T dO and dK += dS^T Q, and stay where they come out. Only dS for dQ = dS K, a sum over
// the keys of both warpgroups, goes through shared memory. dQ leaves as the registers hold it: the
// copy engine adds it to sums in memory, and the last block of a key head makes dQ of them.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   counts [batch, kv_heads]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (384)
//   the host sets: scalar, real, Br, Bc, stages, dS_stages, finishes, d, dv, causal, windowed,
//   threads, shared_bytes
#include <backward/parts/last_block.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/stmatrix.cuh>
#include <tile/shared.cuh>

struct Shared {
  TmaTile<scalar, Bc, d> K;
  TmaTile<scalar, Bc, dv> V;
  TmaTile<scalar, Br, d> Q[stages];
  TmaTile<scalar, Br, dv> dO[stages];
  TmaTile<scalar, Br, Bc> dS[dS_stages];
  Part dQ[consumers];
  RowSums sums[stages];
  Barrier K_full, V_full, Q_full[stages], dO_full[stages], empty[stages];
  int is_last[consumers];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == consumers * warpgroup_rows && !is_wide, "a warpgroup owns 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");
static_assert(dS_stages == 1 || dS_stages == 2, "one that is written while one is read");

// Named barriers.
constexpr int dS_full = 1;   // both warpgroups have written theirs
constexpr int dS_empty = 2;  // and have read all of what was there before
__device__ __forceinline__ int dQ_full(int warpgroup) {
  return 3 + warpgroup;
}
__device__ __forceinline__ int dQ_empty(int warpgroup) {
  return 3 + consumers + warpgroup;
}
constexpr int adding_threads = warpgroup_size + warp_size;

__device__ __forceinline__ void make_barriers(Shared& shared) {
  init_barrier(shared.K_full, 1);
  init_barrier(shared.V_full, 1);
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.Q_full[i], 2);  // Q, and the row sums
    init_barrier(shared.dO_full[i], 1);
    // Each thread says that it has read row sums, for compute-sanitizer follows no order through
    // another one; in time that products take. One of a warpgroup speaks for the tiles.
    init_barrier(shared.empty[i], consuming_threads + consumers);
  }
  fence_barrier_init();
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const Work& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        const RowSums* row_sums, int heads) {
  if (work.first_row >= work.end_row) return;
  load_async(shared.K, K, shared.K_full, work.first_key, work.kv_head, work.batch);
  load_async(shared.V, V, shared.V_full, work.first_key, work.kv_head, work.batch);
  PipelineState<stages> turn;
  work.for_tiles(heads, [&](int head, int row, long long tile) {
    const int i = turn.stage;
    wait(shared.empty[i], turn.phase ^ 1);
    load_async(shared.Q[i], Q, shared.Q_full[i], row, head, work.batch);
    arrive_expect_tx(shared.Q_full[i], sizeof(RowSums));
    bulk_load(&shared.sums[i], row_sums + tile, sizeof(RowSums), shared.Q_full[i]);
    load_async(shared.dO[i], dO, shared.dO_full[i], row, head, work.batch);
    turn.advance();
  });
}

// What a warp does for a warpgroup: it has dQ of each tile added to the sums in memory.
__device__ __forceinline__ void add_dQ(Shared& shared, const Work& work, Part* dQ_sum, int& count,
                                       int all, int warpgroup, int heads) {
  const bool elected = elect_one();
  work.for_tiles(heads, [&](int, int, long long tile) {
    barrier_arrive(dQ_empty(warpgroup), adding_threads);
    barrier_sync(dQ_full(warpgroup), adding_threads);
    if (elected) {
      bulk_add(&dQ_sum[tile * parts + warpgroup % parts].sums[0][0].x,
               &shared.dQ[warpgroup].sums[0][0].x, sizeof(Part) / sizeof(float));
      bulk_commit_group();
      bulk_wait_group_read();
    }
    __syncwarp();  // before another thread says that there is room
  });
  if constexpr (finishes) leave_sums(shared.is_last[warpgroup], count, all, elected);
}

// What a warpgroup of consumers goes through, tile by tile.
struct Consumer {
  Shared& shared;
  Own own;
  Scorer<float> scorer;
  Sums<d_width> dK;
  Sums<dv_width> dV;
  PipelineState<stages> turn;
  PipelineState<dS_stages> dS_turn;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, const Scorer<float>& scorer)
      : shared(shared), own(warpgroup), scorer(scorer), dK(), dV() {}

  // Begins the warpgroup's part of dQ = dS K.
  __device__ __forceinline__ void begin_dQ(Sums<part_width>& dQ) const {
    const auto& dS = shared.dS[dS_turn.stage];
    const int first_row = by_rows_of_dQ ? own.warpgroup * warpgroup_rows : 0;
    const int first_box = by_columns_of_dQ ? own.warpgroup : 0;
    const int own_keys = parts == 1 ? own.warpgroup : 0;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < (parts == 1 ? warpgroup_rows : Bc) / step; ++k) {
      const Matrix own_dS = by_rows(dS.box[k / 4 + own_keys][first_row]) + k % 4 * 32;
      const Matrix keys = by_columns(shared.K.box[first_box][own_keys * warpgroup_rows], Bc);
      multiply_columns<scalar>(dQ, own_dS, keys + k * 2048, k > 0);
    }
    wgmma_commit_group();
  }

  // Writes the warp's columns of dS, whose transpose these are.
  __device__ __forceinline__ void store_dS(const Operands<Br>& operands) const {
    const int lane = opaque(own.lane);
    const int chunk = own.first_key() / 8 + lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < Br / step; ++i) {
      const int row = i * step + lane % 8 + lane / 16 * 8;
      store_matrices_transposed(shared.dS[dS_turn.stage].at(row, chunk), operands[i]);
    }
  }

  // Leaves the part of dQ to the warp that adds it.
  __device__ __forceinline__ void pass_dQ(const Sums<part_width>& dQ) const {
    barrier_sync(dQ_empty(own.warpgroup), adding_threads);
    const int mine = opaque(int(threadIdx.x)) % warpgroup_size;
#pragma unroll
    for (int i = 0; i < part_width / 8; ++i)
      shared.dQ[own.warpgroup].sums[i][mine] =
          float4{dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]};
    fence_proxy_async();
    barrier_arrive(dQ_full(own.warpgroup), adding_threads);
  }

  // A tile. Its products with dS are under way while others are waited for.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair) {
    const int i = turn.stage;
    Sums<Br> S, dP;
    Sums<part_width> dQ;
    Operands<Br> P, dS;
    wait(shared.Q_full[i], turn.phase);
    begin_scores<d_width>(S, shared.K, shared.Q[i], own.warpgroup);
    wait(shared.dO_full[i], turn.phase);
    begin_scores<dv_width>(dP, shared.V, shared.dO[i], own.warpgroup);
    wgmma_wait_group<1>(S);
    if constexpr (has_score_mod) {
      Sums<Br> slopes;
      own.compute_P_and_slopes(S, slopes, shared.sums[i], scorer, pair);
      wgmma_wait_group<0>(dP);
      own.compute_dS(slopes, dP, shared.sums[i]);
    } else {
      own.compute_P(S, shared.sums[i], scorer.scale * log2e);
      own.mask(S, pair);
      wgmma_wait_group<0>(dP);
      own.compute_dS(S, dP, shared.sums[i]);
    }
    pack_operands(S, P);
    pack_operands(dP, dS);
    if (dS_stages == 1) barrier_sync(dS_empty, consuming_threads);
    store_dS(dS);
    begin_sums(dV, P, shared.dO[i]);
    fence_proxy_async();
    barrier_sync(dS_full, consuming_threads);
    begin_dQ(dQ);
    begin_sums(dK, dS, shared.Q[i]);
    arrive(shared.empty[i]);  // row sums were read
    wgmma_wait_group<1>(dQ);
    pass_dQ(dQ);
    wgmma_wait_group<0>(dK);
    settle(dV);
    if (own.leads()) arrive(shared.empty[i]);  // and the tiles
    dS_turn.advance();
    turn.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_columns(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums* row_sums, Part* dQ_sum, int* counts, Tensor<scalar> dQ, Tensor<scalar> dK,
    Tensor<scalar> dV, Sizes sizes, int heads, int kv_heads, int group, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work(sizes, kv_heads, group);
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    const int warp = warp_uniform(threadIdx.x / warp_size);
    if (warp == 0 && elect_one())
      produce(shared, work, Q_map, K_map, V_map, dO_map, row_sums, heads);
    if (warp > 0 && warp <= consumers)
      add_dQ(shared, work, dQ_sum, counts[work.batch * kv_heads + work.kv_head],
             consumers * max(cdiv(sizes.N, Bc), 1), warp - 1, heads);
    return;
  }
  take_from_producer();
  const Scorer<float> scorer = {scale, mods};
  Consumer consumer(shared, warpgroup, scorer);
  if (work.first_row < work.end_row) {
    wait(shared.K_full, 0);
    wait(shared.V_full, 0);
  }
  work.for_tiles(heads, [&](int, int row, long long) {
    consumer.advance({work.extent, row, work.first_key});
  });

  const RepairKeys repair = {work.extent, Q,          K,
                             V,           dO,         {row_sums, work.batch, heads, work.extent.M},
                             scorer,      work.batch, work.kv_head};
  store_or_repair<false>(consumer.dK, dK, consumer.own, work, repair);
  store_or_repair<true>(consumer.dV, dV, consumer.own, work, repair);
  if constexpr (finishes) {
    barrier_sync(sums_left, leaving_threads);
    if (shared.is_last[0] || shared.is_last[1])
      finish_heads(work,
                   {Q, K, V, dO, dQ, row_sums, dQ_sum, work.extent, heads, group, {scale, mods}});
  }
}
