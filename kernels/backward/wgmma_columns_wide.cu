// wgmma_columns_wide: `wgmma_columns` if d or dv is 129 to 256.
//
// dK and dV of 64 keys fill the registers of two warpgroups, so a block owns 64 keys. The first
// warpgroup computes P^T and accumulates dV += P^T dO. The second reads P from shared memory,
// computes dP^T and dS^T, and accumulates dK += dS^T Q, so that no product is computed twice. They
// divide dQ = dS K by columns. dQ reaches global memory as in `wgmma_columns`.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   counts [batch, kv_heads]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (384)
//   the host sets: scalar, result, real, Br, Bc, stages, dO_stages, d, dv, threads, shared_bytes
//   and options (extent.cuh)
#include <backward/parts/block_end.cuh>
#include <backward/parts/column_partition.cuh>
#include <ptx/bulk_copy.cuh>
#include <ptx/bulk_store.cuh>
#include <ptx/dependent_launch.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles
using Task = KeyTile<Br, Bc>;
using Layout = QueryLayout<Br, d, dv>;
using Part = RegisterTile<Layout::width>;
using End = BlockEnd<Part, d, dv>;
constexpr int of_dV = 0, of_dK = 1;  // consumer warpgroups for dV and for dK

struct Shared {
  TmaTile<scalar, Bc, d> K;
  TmaTile<scalar, Bc, dv> V;
  TmaTile<scalar, Br, d> Q[stages];
  TmaTile<scalar, Br, dv> dO[dO_stages];
  TmaTile<scalar, Br, Bc> dS;
  RegisterTile<Br> P;
  Part dQ[consumers];
  RowSums<Br> sums[stages];
  Pipeline<1> K_pipeline, V_pipeline;
  Pipeline<stages> Q_pipeline;
  Pipeline<dO_stages> dO_pipeline;
  int is_last[consumers];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == warpgroup_rows && Layout::is_wide, "two warpgroups share 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads and adds");

// Named barriers. All threads wait for a barrier at the same instruction: if both warpgroups waited
// for dS at one barrier, in different code, the kernel would be correct but slower, and
// compute-sanitizer would report divergent threads.
constexpr int P_full = 1;   // P is written, and the previous dS is no longer read
constexpr int dS_full = 2;  // dS is written, and P is no longer read
constexpr int dS_kept = 8;  // dS is written; only the second warpgroup waits

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.K_pipeline.init(1);
  shared.V_pipeline.init(1);
  // Two loads per stage. Every consumer thread releases the row sums; one more arrival releases Q.
  shared.Q_pipeline.init(consuming_threads + 1, 2);
  shared.dO_pipeline.init(1);
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
  PipelineState<dO_stages> dO_rows;
  bool has_waited = false;
  task.for_tiles([&](int head, int row, long long tile) {
    Barrier& full = shared.Q_pipeline.acquire(rows);
    load_async(shared.Q[rows.stage], Q, full, task.extent.packed_row(row), head, packed);
    if (!has_waited) wait_for_launch_before();  // the previous launch writes the row sums
    has_waited = true;
    arrive_expect_tx(full, sizeof(RowSums<Br>));
    bulk_load(&shared.sums[rows.stage], row_sums + tile, sizeof(RowSums<Br>), full);
    load_async(shared.dO[dO_rows.stage], dO, shared.dO_pipeline.acquire(dO_rows),
               task.extent.packed_row(row), head, packed);
    rows.advance();
    dO_rows.advance();
  });
}

// The first consumer warpgroup, which accumulates dV.
struct ValueConsumer {
  Shared& shared;
  KeyRows own;
  Scorer<float> scorer;
  Sums<width> dV;
  PipelineState<stages> rows;
  PipelineState<dO_stages> dO_rows;

  __device__ __forceinline__ ValueConsumer(Shared& shared, const Scorer<float>& scorer)
      : shared(shared), own(0), scorer(scorer), dV() {}

  // Processes one row tile.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair) {
    const auto& dO = shared.dO[dO_rows.stage];
    Sums<Br> S, PS;
    Operands<Br> P;
    ColumnPartition<Layout, of_dV> dQ;
    shared.Q_pipeline.wait(rows);
    begin_scores(shared.K, shared.Q[rows.stage], S);
    wgmma_wait_group<0>(S);
    own.compute_P(S, PS, shared.sums[rows.stage], scorer, pair);
    shared.P.write(PS);
    barrier_arrive(P_full, consuming_threads);
    shared.Q_pipeline.arrive(rows);  // this thread has read the row sums
    drop_marked(S, PS);
    pack_operands<scalar>(S, P);
    shared.dO_pipeline.wait(dO_rows);
    begin_output(dO, P, dV);
    barrier_sync(dS_full, consuming_threads);
    dQ.begin(shared.dS, shared.K);
    wgmma_wait_group<1>(dV);
    shared.dO_pipeline.release(dO_rows);  // dP, which reads dO, completed before dS
    dQ.pass<0>(shared.dQ[of_dV]);
    rows.advance();
    dO_rows.advance();
  }
};

// The second consumer warpgroup, which accumulates dK.
struct KeyConsumer {
  Shared& shared;
  KeyRows own;
  Sums<depth> dK;
  PipelineState<stages> rows;
  PipelineState<dO_stages> dO_rows;

  __device__ __forceinline__ explicit KeyConsumer(Shared& shared) : shared(shared), own(0), dK() {}

  // Processes one row tile.
  __device__ __forceinline__ void advance(float factor) {
    const auto& Q = shared.Q[rows.stage];
    Sums<Br> PS, dP;
    Operands<Br> dS;
    ColumnPartition<Layout, of_dK> dQ;
    shared.dO_pipeline.wait(dO_rows);
    begin_scores(shared.V, shared.dO[dO_rows.stage], dP);
    wgmma_wait_group<0>(dP);
    barrier_sync(P_full, consuming_threads);  // Q and the row sums have arrived by then, too
    shared.P.read(PS);
    own.compute_dS(PS, dP, shared.sums[rows.stage], factor);
    pack_operands<scalar>(dP, dS);
    store_dS(dS, shared.dS, own);
    fence_proxy_async();
    barrier_arrive(dS_full, consuming_threads);
    barrier_sync(dS_kept, warpgroup_size);
    dQ.begin(shared.dS, shared.K);
    begin_output(Q, dS, dK);
    shared.Q_pipeline.arrive(rows);  // this thread has read the row sums
    dQ.pass<1>(shared.dQ[of_dK]);
    wgmma_wait_group<0>(dK);
    shared.Q_pipeline.release(rows);
    rows.advance();
    dO_rows.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_columns_wide(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const real> lse, const RowSums<Br>* row_sums, Part* dQ_sum, int* counts,
    Tensor<result> dQ, Tensor<result> dK, Tensor<result> dV, Sizes sizes, int heads, int kv_heads,
    int group, real scale, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (gridDim.x <= few_blocks) launch_dependents();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  const Task task = key_tile<Br, Bc>(sizes, mods, kv_heads, group, heads);
  if (warpgroup >= 0) wait_for_launch_before();  // every block must wait, even if it returns below
  if (!task.extent.has_tile_of_keys(task.first_key)) return;
  const End end = {sizes, kv_heads, dQ_sum, nullptr, counts};
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    const int warp = warp_uniform(threadIdx.x / warp_size), of = warp - 1;
    if (warp == 0 && elect_one()) produce(shared, task, Q_map, K_map, V_map, dO_map, row_sums);
    if (warp == 0 || warp > consumers) return;
    add_dQ<Layout>(shared.dQ[of], dQ_sum, task, of, first_part<Layout>(of),
                   first_part<Layout>(of + 1));
    end.leave(shared.dQ[of], shared.is_last[of], task, blockIdx.x, gridDim.x, of);
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
    KeyConsumer keys(shared);
    if (any) shared.V_pipeline.wait();  // no wait for K, which arrives before dS
    task.for_tiles([&](int, int, long long) { keys.advance(task.extent.kept_factor()); });
    store_or_repair<false>(keys.dK, dK, keys.own, task, repair);
  }
  end.finish(repair, dQ, shared.is_last, group);
}
