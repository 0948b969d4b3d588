// wgmma_two_pass_columns: `wgmma_columns` without dQ, which another pass computes.
//
// dK and dV are accumulated in registers over all rows. Warpgroups share only the tiles that they
// read. The order of additions is fixed, so every run returns the same bits.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse [batch, heads, M]    row_sums [batch, heads, cdiv(M, Br)]
//   shared_sums, counts: used by group_shares.cuh    dS: kept for the other pass, see keep_dS.cuh
//   grid (max(cdiv(N, Bc), 1) * kv_heads * splits * batch), a part of it in rounds    block (384)
//   the host sets: scalar, result, real, Br, Bc, stages, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <backward/parts/group_shares.cuh>
#include <backward/parts/load_rows.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles
using Task = KeyTile<Br, Bc>;
using Shares = GroupShares<Sums<depth>, Sums<width>, consuming_threads>;

struct Shared {
  TmaTile<scalar, Bc, d> K;
  TmaTile<scalar, Bc, dv> V;
  TmaTile<scalar, Br, d> Q[stages];
  TmaTile<scalar, Br, dv> dO[stages];
  RowSums<Br> sums[stages];
  Pipeline<1> K_pipeline, V_pipeline;
  Pipeline<stages> Q_pipeline, dO_pipeline;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == consumers * warpgroup_rows, "a warpgroup owns 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

// The first of `stages` named barriers: both warpgroups have read the row sums of a stage.
constexpr int sums_read = 1;
static_assert(sums_read + stages <= 16, "a block has 16 named barriers");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.K_pipeline.init(1);
  shared.V_pipeline.init(1);
  shared.Q_pipeline.init(consumers, 2);  // two loads per stage: Q and the row sums
  shared.dO_pipeline.init(consumers);
  fence_barrier_init();
}

// A consumer warpgroup.
struct Consumer {
  Shared& shared;
  KeyRows own;
  Scorer<float> scorer;
  Sums<depth> dK;
  Sums<width> dV;
  PipelineState<stages> rows;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, const Scorer<float>& scorer)
      : shared(shared), own(warpgroup), scorer(scorer), dK(), dV() {}

  // Processes one row tile.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair, const KeepDS& keep,
                                          int head) {
    const auto& Q = shared.Q[rows.stage];
    const auto& dO = shared.dO[rows.stage];
    const auto& sums = shared.sums[rows.stage];
    Sums<Br> S, dP;
    Operands<Br> P, dS;
    shared.Q_pipeline.wait(rows);
    begin_scores(shared.K, Q, S, own.warpgroup * warpgroup_rows);
    shared.dO_pipeline.wait(rows);
    begin_scores(shared.V, dO, dP, own.warpgroup * warpgroup_rows);
    own.compute_P_and_dS(S, dP, sums, scorer, pair);
    pack_operands<scalar>(S, P);
    pack_operands<scalar>(dP, dS);
    begin_output(dO, P, dV);
    keep(dS, pair, head, own);
    begin_output(Q, dS, dK);
    wgmma_wait_group<0>(dK);
    read_after_here(dV);
    barrier_arrive(sums_read + rows.stage, reading_threads);
    shared.Q_pipeline.release(rows);
    shared.dO_pipeline.release(rows);
    rows.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_columns(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const real> lse, const RowSums<Br>* row_sums, Tensor<result> dK, Tensor<result> dV,
    real* shared_sums, int* counts, scalar* dS, Sizes sizes, int heads, int kv_heads, int group,
    int splits, int stride, int first_block, int first_head, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  const Shares shares = {shared_sums, counts, splits, stride};
  const Task task = key_tile<Br, Bc>(sizes, mods, kv_heads, group, heads, blocks_of_group(splits),
                                     blockIdx.x, gridDim.x, first_block);
  if (warpgroup >= 0) {  // every block must wait, even if it returns below
    wait_for_launch_before();
    launch_dependents();  // not earlier: the next launch reads row sums without waiting
  }
  if (!task.extent.has_tile_of_keys(task.first_key)) return;
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    const int warp = warp_uniform(threadIdx.x / warp_size);
    const auto task_of = [&](int) { return task; };
    if (warp == 0) return produce_Q(shared, OneTile(), task_of, Q_map, K_map, row_sums, sums_read);
    if (warp == 1) produce_dO(shared, OneTile(), task_of, V_map, dO_map);
    return;
  }
  increase_registers<consumer_registers>();
  const Scorer<float> scorer = {scale, mods};
  const KeepDS keep(dS, sizes, first_head - task.batch * heads);
  Consumer consumer(shared, warpgroup, scorer);
  if (task.first_row < task.end_row) {
    shared.K_pipeline.wait();
    shared.V_pipeline.wait();
  }
  task.for_tiles([&](int head, int row, long long) {
    consumer.advance({extent_of_head(task.extent, head), row, task.first_key}, keep, head);
  });

  if (!shares.complete(consumer.dK, consumer.dV, task.index)) return;
  const StatsOfTiles<Br> stats = {row_sums, task.number, lse, task.batch};
  const Repair<d, dv, scalar, StatsOfTiles<Br>> repair = {
      task.extent, Q, K, V, dO, stats, scorer, task.batch, task.kv_head};
  store_or_repair<false>(consumer.dK, dK, consumer.own, task, repair);
  store_or_repair<true>(consumer.dV, dV, consumer.own, task, repair);
}
