// wgmma_columns_persistent: `wgmma_columns` for short sequences, whose blocks go from one tile of
// keys to the next.
//
// There is one block for each multiprocessor. It loads the next tile while it stores the gradients
// of the last one. A launch of its own makes dQ of the sums: here it would take registers.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   grid (min(multiprocessors, cdiv(N, Bc) * kv_heads * batch))    block (384)
//   the host sets: scalar, result, real, Br, Bc, stages, dS_stages, pair_bytes, batch_first, d, dv,
//   threads, shared_bytes and options (score.cuh)
#include <backward/parts/add_dQ.cuh>
#include <backward/parts/own_tiles.cuh>
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
  shared.K_pipeline.init(consumers);
  shared.V_pipeline.init(consumers);
  shared.Q_pipeline.init(consumers, 2);  // two loads: Q, and the row sums
  shared.dO_pipeline.init(consumers);
  fence_barrier_init();
}

// A warp loads, for each task, K and, tile by tile, Q and the row sums, as in wgmma_columns.cu.
template <class Tasks>
__device__ __forceinline__ void produce_Q(Shared& shared, const Tasks& tasks, const TensorMap& Q,
                                          const TensorMap& K, const RowSums<Br>* row_sums) {
  const bool elected = elect_one();
  PipelineState<stages> rows;
  int begun = 0;
  tasks([&](const Task& task, PipelineState<1> keys) {
    const int packed = task.extent.packed_batch(task.batch);
    if (elected)
      load_async(shared.K, K, shared.K_pipeline.acquire(keys),
                 task.extent.packed_key(task.first_key), task.kv_head, packed);
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
  });
}

// A thread of another warp loads V and dO.
template <class Tasks>
__device__ __forceinline__ void produce_dO(Shared& shared, const Tasks& tasks, const TensorMap& V,
                                           const TensorMap& dO) {
  PipelineState<stages> rows;
  tasks([&](const Task& task, PipelineState<1> keys) {
    const int packed = task.extent.packed_batch(task.batch);
    load_async(shared.V, V, shared.V_pipeline.acquire(keys), task.extent.packed_key(task.first_key),
               task.kv_head, packed);
    task.for_tiles([&](int head, int row, long long) {
      load_async(shared.dO[rows.stage], dO, shared.dO_pipeline.acquire(rows),
                 task.extent.packed_row(row), head, packed);
      rows.advance();
    });
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
      : shared(shared), own(warpgroup), scorer(scorer) {}

  // dK and dV of a task: all its tiles of rows.
  __device__ __forceinline__ void run(const Task& task, PipelineState<1> keys) {
    for (float& x : dK) x = 0;
    for (float& x : dV) x = 0;
    shared.K_pipeline.wait(keys);
    shared.V_pipeline.wait(keys);
    task.for_tiles([&](int head, int row, long long) {
      const TilePair<Br, Bc> pair = {task.extent.of_head(head), row, task.first_key};
      if (task.is_first(head, row)) shared.pairs.own().load(pair, row, own.first_key());
      advance(pair, task.after(head, row));
    });
    // Products bring the threads together; where there are none, a late one would miss these keys.
    if (task.first_row >= task.end_row) barrier_sync(dS_full, consuming_threads);
    shared.K_pipeline.release(keys);
    shared.V_pipeline.release(keys);
  }

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

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_columns_persistent(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums<Br>* row_sums, Part* dQ_sum, Tensor<result> dK, Tensor<result> dV, Sizes sizes,
    int heads, int kv_heads, int group, real scale, int batch, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  // body(task, the state of K and V) for the block's tiles of keys, one in each round.
  const auto tasks = [&](auto body) {
    const int tiles = cdiv(sizes.N, Bc), all = tiles * kv_heads * batch;
    for_own_tiles(tiles, all, [&](int tile, int round) {
      body(key_tile<Br, Bc, batch_first, true>(sizes, mods, kv_heads, group, heads, all, tile),
           PipelineState<1>{0, round % 2});
    });
  };
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    const int warp = warp_uniform(threadIdx.x / warp_size), of = warp - 1;
    if (warp == 0) return produce_Q(shared, tasks, Q_map, K_map, row_sums);
    if (warp > consumers) {
      if (elect_one()) produce_dO(shared, tasks, V_map, dO_map);
      return;
    }
    tasks([&](const Task& task, PipelineState<1>) {
      add_dQ<Parts>(shared.dQ[of], dQ_sum, task, of, of % Parts::count, of % Parts::count + 1);
    });
    return;
  }
  increase_registers<consumer_registers>();
  const Scorer<float> scorer = {scale, mods};
  Consumer consumer(shared, warpgroup, scorer);
  tasks([&](const Task& task, PipelineState<1> keys) {
    consumer.run(task, keys);
    const StatsOfTiles<Br> stats = {row_sums, task.number};
    const Repair<d, dv, scalar, StatsOfTiles<Br>> repair = {
        task.extent, Q, K, V, dO, stats, scorer, task.batch, task.kv_head};
    store_or_repair<false>(consumer.dK, dK, consumer.own, task, repair);
    store_or_repair<true>(consumer.dV, dV, consumer.own, task, repair);
    __syncwarp();  // the compiler has uniform registers for threads that are together
  });
}
