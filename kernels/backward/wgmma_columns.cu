// wgmma_columns: `columns` on Hopper's tensor cores. Two warpgroups own 64 keys each. One
// warp loads Q, K and row sums, another V and dO; two more add to dQ, for which no warpgroup waits.
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
//   the host sets: scalar, result, real, Br, Bc, stages, dS_stages, finishes, pair_bytes,
//   batch_first, d, dv, threads, shared_bytes and options (score.cuh)
#include <backward/parts/add_dQ.cuh>
#include <ptx/bulk_copy.cuh>
#include <tile/shared.cuh>

constexpr int depth = cdiv(d, step) * step;   // of Q and K, filled up with zeros
constexpr int width = cdiv(dv, step) * step;  // of dO and V
using Task = KeyTile<Br, Bc>;
using Parts = QueryParts<Br, d, dv>;
using Part = RegisterTile<Parts::width>;
using Pairs = OfWarps<StagedColumns<pair_bytes, Br / 8>, 4 * consumers>;

struct Shared {
  TmaTile<scalar, Bc, d> K;
  TmaTile<scalar, Bc, dv> V;
  TmaTile<scalar, Br, d> Q[stages];
  TmaTile<scalar, Br, dv> dO[stages];
  TmaTile<scalar, Br, Bc> dS[dS_stages];
  Part dQ[consumers];
  RowSums<Br> sums[stages];
  Pipeline<1> K_pipeline, V_pipeline;
  Pipeline<stages> Q_pipeline, dO_pipeline;
  int is_last[consumers];
  Pairs pairs;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == consumers * warpgroup_rows && !Parts::is_wide, "a warpgroup owns 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads and adds");
static_assert(dS_stages == 1 || dS_stages == 2, "one that is written while one is read");

// Named barriers.
constexpr int dS_full = 1;   // both warpgroups have written theirs
constexpr int dS_empty = 2;  // and have read all of what was there before

// And this one: both have read the row sums of a stage.
__device__ __forceinline__ int sums_read(int stage) {
  return sums_left + 1 + stage;
}
static_assert(sums_left + 1 + stages <= 16, "a block has 16 named barriers");
constexpr int reading_threads = consuming_threads + warp_size;

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.K_pipeline.init(1);
  shared.V_pipeline.init(1);
  shared.Q_pipeline.init(consumers, 2);  // two loads: Q, and the row sums
  shared.dO_pipeline.init(consumers);
  fence_barrier_init();
}

// A warp loads K and, tile by tile, Q and the row sums; one of its threads starts the copies. Row
// sums were read when Q is released, but by other threads, and compute-sanitizer follows no order
// through the one that releases. So the warp meets all that read them at a named barrier, where
// they arrive without waiting.
__device__ __forceinline__ void produce_Q(Shared& shared, const Task& task, const TensorMap& Q,
                                          const TensorMap& K, const RowSums<Br>* row_sums) {
  if (task.first_row >= task.end_row) return;
  const bool elected = elect_one();
  const int packed = task.extent.packed_batch(task.batch);
  if (elected)
    load_async(shared.K, K, shared.K_pipeline.acquire(), task.extent.packed_key(task.first_key),
               task.kv_head, packed);
  PipelineState<stages> rows;
  int begun = 0;
  task.for_tiles([&](int head, int row, long long tile) {
    __syncwarp();
    if (begun++ >= stages) barrier_sync(sums_read(rows.stage), reading_threads);
    if (elected) {
      Barrier& full = shared.Q_pipeline.acquire(rows);
      load_async(shared.Q[rows.stage], Q, full, task.extent.packed_row(row), head, packed);
      arrive_expect_tx(full, sizeof(RowSums<Br>));
      bulk_load(&shared.sums[rows.stage], row_sums + tile, sizeof(RowSums<Br>), full);
    }
    rows.advance();
  });
}

// A thread of another warp loads V and dO, which is released earlier than Q.
__device__ __forceinline__ void produce_dO(Shared& shared, const Task& task, const TensorMap& V,
                                           const TensorMap& dO) {
  if (task.first_row >= task.end_row) return;
  const int packed = task.extent.packed_batch(task.batch);
  load_async(shared.V, V, shared.V_pipeline.acquire(), task.extent.packed_key(task.first_key),
             task.kv_head, packed);
  PipelineState<stages> rows;
  task.for_tiles([&](int head, int row, long long) {
    load_async(shared.dO[rows.stage], dO, shared.dO_pipeline.acquire(rows),
               task.extent.packed_row(row), head, packed);
    rows.advance();
  });
}

// A warpgroup of consumers.
struct Consumer {
  Shared& shared;
  Own own;
  Scorer<float> scorer;
  Sums<depth> dK;
  Sums<width> dV;
  PipelineState<stages> rows;
  PipelineState<dS_stages> dS_tile;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, const Scorer<float>& scorer)
      : shared(shared), own(warpgroup), scorer(scorer), dK(), dV() {}

  // Begins the warpgroup's part of dQ = dS K: of its rows, columns or keys.
  __device__ __forceinline__ void begin_dQ(Sums<Parts::width>& dQ) const {
    const int first = own.warpgroup * warpgroup_rows;
    ::begin_dQ<Parts::count == 1 ? warpgroup_rows : Bc>(
        shared.dS[dS_tile.stage], shared.K, dQ, Parts::by_rows ? first : 0,
        Parts::count == 1 ? first : 0, Parts::by_columns ? own.warpgroup : 0);
  }

  // A tile of rows. Its products with dS are under way while others are waited for. For tiles that
  // are not masked there is a copy of this code without masks.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair, int next_row) {
    if (is_masked(pair))
      advance<true>(pair, next_row);
    else
      advance<false>(pair, next_row);
  }
  template <bool masks>
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair, int next_row) {
    const auto& Q = shared.Q[rows.stage];
    const auto& dO = shared.dO[rows.stage];
    const auto& sums = shared.sums[rows.stage];
    Sums<Br> S, dP;
    Sums<Parts::width> dQ;
    Operands<Br> P, dS;
    shared.Q_pipeline.wait(rows);
    begin_scores(shared.K, Q, S, own.warpgroup * warpgroup_rows);
    shared.dO_pipeline.wait(rows);
    begin_scores(shared.V, dO, dP, own.warpgroup * warpgroup_rows);
    own.compute_P_and_dS<masks>(S, dP, sums, scorer, pair, shared.pairs.own(), next_row);
    pack_operands<scalar>(S, P);
    pack_operands<scalar>(dP, dS);
    if (dS_stages == 1) barrier_sync(dS_empty, consuming_threads);
    store_dS(dS, shared.dS[dS_tile.stage], own);
    begin_output(dO, P, dV);
    fence_proxy_async();
    barrier_sync(dS_full, consuming_threads);
    begin_dQ(dQ);
    wgmma_wait_group<1>(dV);
    shared.dO_pipeline.release(rows);
    begin_output(Q, dS, dK);
    barrier_arrive(sums_read(rows.stage), reading_threads);
    wgmma_wait_group<1>(dQ);
    pass_dQ(dQ, shared.dQ[own.warpgroup], own.warpgroup);
    wgmma_wait_group<0>(dK);
    shared.Q_pipeline.release(rows);
    dS_tile.advance();
    rows.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_columns(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums<Br>* row_sums, Part* dQ_sum, int* counts, Tensor<result> dQ, Tensor<result> dK,
    Tensor<result> dV, Sizes sizes, int heads, int kv_heads, int group, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const Task task = key_tile<Br, Bc, batch_first>(sizes, mods, kv_heads, group, heads);
  if (!task.extent.has_tile_of_keys(task.first_key)) return;
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    const int warp = warp_uniform(threadIdx.x / warp_size), of = warp - 1;
    if (warp == 0) return produce_Q(shared, task, Q_map, K_map, row_sums);
    if (warp > consumers) {
      if (elect_one()) produce_dO(shared, task, V_map, dO_map);
      return;
    }
    add_dQ<Parts>(shared.dQ[of], dQ_sum, task, of, of % Parts::count, of % Parts::count + 1);
    if constexpr (finishes)
      leave_sums(shared.is_last[of], counts[task.batch * kv_heads + task.kv_head],
                 consumers * max(cdiv(sizes.N, Bc), 1));
    return;
  }
  increase_registers<consumer_registers>();
  const Scorer<float> scorer = {scale, mods};
  Consumer consumer(shared, warpgroup, scorer);
  if (task.first_row < task.end_row) {
    shared.K_pipeline.wait();
    shared.V_pipeline.wait();
  }
  task.for_tiles([&](int head, int row, long long) {
    const TilePair<Br, Bc> pair = {task.extent.of_head(head), row, task.first_key};
    if (task.is_first(head, row)) shared.pairs.own().load(pair, row, consumer.own.first_key());
    consumer.advance(pair, task.after(head, row));
  });

  const StatsOfTiles<Br> stats = {row_sums, task.number};
  const Repair<d, dv, scalar, StatsOfTiles<Br>> repair = {
      task.extent, Q, K, V, dO, stats, scorer, task.batch, task.kv_head};
  store_or_repair<false>(consumer.dK, dK, consumer.own, task, repair);
  store_or_repair<true>(consumer.dV, dV, consumer.own, task, repair);
  if constexpr (finishes) {
    barrier_sync(sums_left, leaving_threads);
    if (shared.is_last[0] || shared.is_last[1])
      finish_heads<Br, d, dv>({repair, dQ_sum, dQ}, group);
  }
}
