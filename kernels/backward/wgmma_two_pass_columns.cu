// wgmma_two_pass_columns: `wgmma_columns` without dQ, which another pass sums.
//
// What is left stays in registers from the first row to the last: warpgroups share nothing but the
// tiles that they read, and every sum has one order.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (384)
//   the host sets: scalar, real, Br, Bc, stages, d, dv, causal, windowed, threads, shared_bytes
#include <backward/parts/own_keys.cuh>
#include <tile/shared.cuh>

struct Shared {
  TmaTile<scalar, Bc, d> K;
  TmaTile<scalar, Bc, dv> V;
  TmaTile<scalar, Br, d> Q[stages];
  TmaTile<scalar, Br, dv> dO[stages];
  RowSums sums[stages];
  Barrier K_full, V_full, Q_full[stages], dO_full[stages], empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == consumers * warpgroup_rows && !is_wide, "a warpgroup owns 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  init_barrier(shared.K_full, 1);
  init_barrier(shared.V_full, 1);
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.Q_full[i], 2);  // Q, and the row sums
    init_barrier(shared.dO_full[i], 1);
    // Each thread that has read row sums, for compute-sanitizer follows no order through another.
    init_barrier(shared.empty[i], consuming_threads);
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

// What a warpgroup of consumers goes through, tile by tile.
struct Consumer {
  Shared& shared;
  Own own;
  Scorer<float> scorer;
  Sums<d_width> dK;
  Sums<dv_width> dV;
  PipelineState<stages> turn;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, const Scorer<float>& scorer)
      : shared(shared), own(warpgroup), scorer(scorer), dK(), dV() {}

  // A tile.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair) {
    const int i = turn.stage;
    Sums<Br> S, dP;
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
    begin_sums(dV, P, shared.dO[i]);
    begin_sums(dK, dS, shared.Q[i]);
    wgmma_wait_group<0>(dK);
    settle(dV);
    arrive(shared.empty[i]);
    turn.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_columns(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums* row_sums, Tensor<scalar> dK, Tensor<scalar> dV, Sizes sizes, int heads,
    int kv_heads, int group, real scale, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work(sizes, kv_heads, group);
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, work, Q_map, K_map, V_map, dO_map, row_sums, heads);
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
}
