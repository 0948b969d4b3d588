// wgmma_two_pass_columns_wide: `wgmma_columns_wide` without dQ, which another pass computes.
//
// Only P passes between the warpgroups. Each stage has a buffer for P, as for Q and dO, so that the
// first warpgroup may run one tile ahead of the second.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse [batch, heads, M]    row_sums [batch, heads, cdiv(M, Br)]
//   dS: kept for the other pass, see keep_dS.cuh
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch), a part of it in rounds    block (384)
//   the host sets: scalar, result, real, Br, Bc, stages, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <backward/parts/register_tile.cuh>
#include <backward/parts/transposed_softmax.cuh>
#include <ptx/bulk_copy.cuh>
#include <ptx/dependent_launch.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles
using Task = KeyTile<Br, Bc>;
constexpr int warps = warpgroup_size / warp_size;  // warps per warpgroup
constexpr int of_dV = 0, of_dK = 1;                // consumer warpgroups for dV and for dK

struct Shared {
  TmaTile<scalar, Bc, d> K;
  TmaTile<scalar, Bc, dv> V;
  TmaTile<scalar, Br, d> Q[stages];
  TmaTile<scalar, Br, dv> dO[stages];
  RegisterTile<Br> P[stages];
  RowSums<Br> sums[stages];
  Pipeline<1> K_pipeline, V_pipeline;
  Pipeline<stages> Q_pipeline, dO_pipeline;
  Barrier P_full[stages][warps];  // a warp of the first warpgroup has written its P
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == warpgroup_rows, "two warpgroups share 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.K_pipeline.init(1);
  shared.V_pipeline.init(1);
  // Two loads, as in wgmma_two_pass_columns.cu. Every thread arrives after reading P and sums.
  shared.Q_pipeline.init(consuming_threads, 2);
  shared.dO_pipeline.init(consumers);
  for (int i = 0; i < stages * warps; ++i) init_barrier(shared.P_full[i / warps][i % warps], 32);
  fence_barrier_init();
}

// The elected producer thread loads K and V once, then Q, the row sums and dO tile by tile.
__device__ __forceinline__ void produce(Shared& shared, const Task& task, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        const RowSums<Br>* row_sums) {
  if (task.first_row >= task.end_row) return;
  const int packed = task.extent.packed_batch(task.batch);
  load_async(shared.K, K, shared.K_pipeline.acquire(), task.extent.packed_key(task.first_key),
             task.kv_head, packed);
  load_async(shared.V, V, shared.V_pipeline.acquire(), task.extent.packed_key(task.first_key),
             task.kv_head, packed);
  PipelineState<stages> rows;
  bool has_waited = false;
  task.for_tiles([&](int head, int row, long long tile) {
    Barrier& full = shared.Q_pipeline.acquire(rows);
    load_async(shared.Q[rows.stage], Q, full, task.extent.packed_row(row), head, packed);
    if (!has_waited) wait_for_launch_before();  // the previous launch writes the row sums
    has_waited = true;
    arrive_expect_tx(full, sizeof(RowSums<Br>));
    bulk_load(&shared.sums[rows.stage], row_sums + tile, sizeof(RowSums<Br>), full);
    load_async(shared.dO[rows.stage], dO, shared.dO_pipeline.acquire(rows),
               task.extent.packed_row(row), head, packed);
    rows.advance();
  });
}

// The first consumer warpgroup, which accumulates dV.
struct ValueConsumer {
  Shared& shared;
  KeyRows own;
  Scorer<float> scorer;
  Sums<width> dV;
  PipelineState<stages> rows;

  __device__ __forceinline__ ValueConsumer(Shared& shared, const Scorer<float>& scorer)
      : shared(shared), own(0), scorer(scorer), dV() {}

  // Processes one row tile.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair) {
    const auto& dO = shared.dO[rows.stage];
    Sums<Br> S, PS;
    Operands<Br> P;
    shared.Q_pipeline.wait(rows);
    begin_scores(shared.K, shared.Q[rows.stage], S);
    wgmma_wait_group<0>(S);
    own.compute_P(S, PS, shared.sums[rows.stage], scorer, pair);
    shared.P[rows.stage].write(PS);
    arrive(shared.P_full[rows.stage][own.warp]);
    shared.Q_pipeline.arrive(rows);
    drop_marked(S, PS);
    pack_operands<scalar>(S, P);
    shared.dO_pipeline.wait(rows);
    begin_output(dO, P, dV);
    wgmma_wait_group<0>(dV);
    shared.dO_pipeline.release(rows);
    rows.advance();
  }
};

// The second consumer warpgroup, which accumulates dK.
struct KeyConsumer {
  Shared& shared;
  KeyRows own;
  KeepDS keep;
  Sums<depth> dK;
  PipelineState<stages> rows;

  __device__ __forceinline__ KeyConsumer(Shared& shared, const KeepDS& keep)
      : shared(shared), own(0), keep(keep), dK() {}

  // Processes one row tile.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair, int head) {
    const auto& Q = shared.Q[rows.stage];
    Sums<Br> PS, dP;
    Operands<Br> dS;
    shared.dO_pipeline.wait(rows);
    begin_scores(shared.V, shared.dO[rows.stage], dP);
    wait(shared.P_full[rows.stage][own.warp], rows.phase);  // Q and row sums have arrived by then
    shared.P[rows.stage].read(PS);
    wgmma_wait_group<0>(dP);
    shared.dO_pipeline.release(rows);
    own.compute_dS(PS, dP, shared.sums[rows.stage], pair.extent.kept_factor());
    pack_operands<scalar>(dP, dS);
    keep(dS, pair, head, own);
    begin_output(Q, dS, dK);
    wgmma_wait_group<0>(dK);
    shared.Q_pipeline.arrive(rows);
    rows.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_columns_wide(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const real> lse, const RowSums<Br>* row_sums, Tensor<result> dK, Tensor<result> dV,
    scalar* dS, Sizes sizes, int heads, int kv_heads, int group, int first_block, int first_head,
    real scale, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  const Task task =
      key_tile<Br, Bc>(sizes, mods, kv_heads, group, heads, 1, blockIdx.x, gridDim.x, first_block);
  if (warpgroup >= 0) {  // every block must wait, even if it returns below
    wait_for_launch_before();
    launch_dependents();  // not earlier: the next launch reads row sums without waiting
  }
  if (!task.extent.has_tile_of_keys(task.first_key)) return;
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, task, Q_map, K_map, V_map, dO_map, row_sums);
    return;
  }
  increase_registers<consumer_registers>();
  const Scorer<float> scorer = {scale, mods};
  const StatsOfTiles<Br> stats = {row_sums, task.number, lse, task.batch};
  const Repair<d, dv, scalar, StatsOfTiles<Br>> repair = {
      task.extent, Q, K, V, dO, stats, scorer, task.batch, task.kv_head};
  const bool any = task.first_row < task.end_row;
  if (warpgroup == of_dV) {
    ValueConsumer values(shared, scorer);
    if (any) shared.K_pipeline.wait();
    task.for_tiles([&](int head, int row, long long) {
      values.advance({extent_of_head(task.extent, head), row, task.first_key});
    });
    store_or_repair<true>(values.dV, dV, values.own, task, repair);
  } else {
    KeyConsumer keys(shared, KeepDS(dS, sizes, first_head - task.batch * heads));
    if (any) shared.V_pipeline.wait();
    task.for_tiles([&](int head, int row, long long) {
      keys.advance({extent_of_head(task.extent, head), row, task.first_key}, head);
    });
    store_or_repair<false>(keys.dK, dK, keys.own, task, repair);
  }
}
