// wgmma_two_pass_columns_wide: `wgmma_columns_wide` without dQ, which another pass sums.
//
// Only P is passed on, and a stage has room for it as for Q and dO: the first warpgroup may be a
// tile ahead of the second.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (384)
//   the host sets: scalar, real, Br, Bc, stages, d, dv, causal, windowed, threads, shared_bytes
#include <tile/shared.cuh>
#include <backward/parts/shared_keys.cuh>

constexpr int warps = warpgroup_size / warp_size;  // of a warpgroup

struct Shared {
  TmaTile<scalar, Bc, d> K;
  TmaTile<scalar, Bc, dv> V;
  TmaTile<scalar, Br, d> Q[stages];
  TmaTile<scalar, Br, dv> dO[stages];
  PassedP P[stages];
  RowSums sums[stages];
  Barrier K_full, V_full, Q_full[stages], Q_empty[stages], dO_full[stages], dO_empty[stages];
  Barrier P_full[stages][warps];  // what a warp reads one other has written
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  init_barrier(shared.K_full, 1);
  init_barrier(shared.V_full, 1);
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.Q_full[i], 2);  // Q, and the row sums
    // Each thread that has read row sums or P, or written P, as in wgmma_two_pass_columns.cu.
    init_barrier(shared.Q_empty[i], consuming_threads);
    init_barrier(shared.dO_full[i], 1);
    init_barrier(shared.dO_empty[i], consumers);
    for (int warp = 0; warp < warps; ++warp) init_barrier(shared.P_full[i][warp], warp_size);
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
    wait(shared.Q_empty[i], turn.phase ^ 1);
    load_async(shared.Q[i], Q, shared.Q_full[i], row, head, work.batch);
    arrive_expect_tx(shared.Q_full[i], sizeof(RowSums));
    bulk_load(&shared.sums[i], row_sums + tile, sizeof(RowSums), shared.Q_full[i]);
    wait(shared.dO_empty[i], turn.phase ^ 1);
    load_async(shared.dO[i], dO, shared.dO_full[i], row, head, work.batch);
    turn.advance();
  });
}

// What the first warpgroup goes through, tile by tile.
struct ValueConsumer {
  Shared& shared;
  Own own;
  Scorer<float> scorer;
  Sums<dv_width> dV;
  PipelineState<stages> turn;

  __device__ __forceinline__ ValueConsumer(Shared& shared, const Scorer<float>& scorer)
      : shared(shared), own(0), scorer(scorer), dV() {}

  // A tile. P of the last one here was read before the stage was filled again.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair) {
    const int i = turn.stage;
    Sums<Br> S;
    Operands<Br> P;
    wait(shared.Q_full[i], turn.phase);
    begin_scores<d_width>(S, shared.K, shared.Q[i], 0);
    wgmma_wait_group<0>(S);
    if constexpr (has_score_mod) {
      Sums<Br> slopes;
      own.compute_P_and_slopes(S, slopes, shared.sums[i], scorer, pair);
      shared.P[i].write(slopes);
    } else {
      own.compute_P(S, shared.sums[i], scorer.scale * log2e);
      own.mask(S, pair);
      shared.P[i].write(S);
    }
    arrive(shared.P_full[i][own.warp]);
    arrive(shared.Q_empty[i]);
    pack_operands(S, P);
    wait(shared.dO_full[i], turn.phase);
    begin_sums(dV, P, shared.dO[i]);
    wgmma_wait_group<0>(dV);
    if (own.leads()) arrive(shared.dO_empty[i]);
    turn.advance();
  }
};

// What the second goes through.
struct KeyConsumer {
  Shared& shared;
  Own own;
  Sums<d_width> dK;
  PipelineState<stages> turn;

  __device__ __forceinline__ explicit KeyConsumer(Shared& shared) : shared(shared), own(0), dK() {}

  // A tile.
  __device__ __forceinline__ void advance() {
    const int i = turn.stage;
    Sums<Br> P, dP;
    Operands<Br> dS;
    wait(shared.dO_full[i], turn.phase);
    begin_scores<dv_width>(dP, shared.V, shared.dO[i], 0);
    wait(shared.P_full[i][own.warp], turn.phase);  // and with it Q and the row sums are there
    shared.P[i].read(P);
    wgmma_wait_group<0>(dP);
    if (own.leads()) arrive(shared.dO_empty[i]);
    own.compute_dS(P, dP, shared.sums[i]);
    pack_operands(dP, dS);
    begin_sums(dK, dS, shared.Q[i]);
    wgmma_wait_group<0>(dK);
    arrive(shared.Q_empty[i]);
    turn.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_columns_wide(
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
  const bool any = work.first_row < work.end_row;
  const Scorer<float> scorer = {scale, mods};
  const RepairKeys repair = {work.extent, Q,          K,
                             V,           dO,         {row_sums, work.batch, heads, work.extent.M},
                             scorer,      work.batch, work.kv_head};
  if (warpgroup == of_dV) {
    ValueConsumer values(shared, scorer);
    if (any) wait(shared.K_full, 0);
    work.for_tiles(heads, [&](int, int row, long long) {
      values.advance({work.extent, row, work.first_key});
    });
    store_or_repair<true>(values.dV, dV, values.own, work, repair);
  } else {
    KeyConsumer keys(shared);
    if (any) wait(shared.V_full, 0);
    work.for_tiles(heads, [&](int, int, long long) { keys.advance(); });
    store_or_repair<false>(keys.dK, dK, keys.own, work, repair);
  }
}
