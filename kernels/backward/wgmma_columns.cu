// wgmma_columns: `columns` on Hopper's tensor cores, warp-specialized. Two consumer warpgroups own
// 64 keys each. One producer warp loads K, Q and row sums, another V and dO, and two others add dQ
// to global memory in the background.
//
// Scores are computed transposed, S^T = K Q^T, so that P^T and dS^T stay in registers as operands
// of dV += P^T dO and dK += dS^T Q. Only dS for dQ = dS K goes through shared memory, because this
// product sums over the keys of both warpgroups. dQ stays in register order: TMA reduce-add adds it
// to dQ_sum, and another launch converts it (block_end.cuh).
//
// A block processes one key tile. For short sequences blocks are `persistent`: they take tiles from
// a queue, counted by counts[0], and load the next tile while they store the last gradients.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   counts, key_sums: used by block_end.cuh; counts[0] by persistent blocks
//   grid (max(cdiv(N, Bc), 1) * kv_heads * splits * batch), or one block per SM if persistent
//   block (384)
//   the host sets: scalar, result, real, Br, Bc, stages, dS_stages, persistent, bias_bytes,
//   batch_first, d, dv, threads, shared_bytes and options (extent.cuh)
#include <attention/bias_tile.cuh>
#include <backward/parts/add_dQ.cuh>
#include <backward/parts/block_end.cuh>
#include <backward/parts/load_rows.cuh>
#include <backward/parts/register_operands.cuh>
#include <backward/parts/tile_of_block.cuh>
#include <backward/parts/tile_queue.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles
using Task = KeyTile<Br, Bc>;
using Layout = QueryLayout<Br, d, dv>;
using Part = RegisterTile<Layout::width>;
using End = BlockEnd<Part, d, dv>;
using Bias = OfWarps<StagedBiasColumns<bias_bytes, Br / 8>, 4 * consumers>;
// Whether V stays in registers, so that it is read from shared memory only once. Expressions that
// read indices or arrays leave too few registers for it.
constexpr bool keeps_V = Layout::by_rows && dv <= 64 && unit_slope && !has_dropout &&
                         !(has_score_mod && reads_places && bias_bytes == 0);
// Whether warpgroups skip the quarter of a tile that a causal mask hides.
constexpr bool has_quarters = Layout::by_rows && dS_stages == 2 && causal && !windowed &&
                              !has_row_tiles && !has_dropout && bias_bytes == 0;

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
  TileQueue queue;
  Bias bias;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == consumers * warpgroup_rows && !Layout::is_wide, "a warpgroup owns 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads and adds");
static_assert(dS_stages == 1 || dS_stages == 2, "dS has one buffer or two");

// Named barriers.
constexpr int dS_full = 1;   // both warpgroups have written dS
constexpr int dS_empty = 2;  // both warpgroups have read the previous dS

// The first of `stages` barriers: both warpgroups have read the row sums of a stage.
constexpr int sums_read = sums_left + 1;
// In a tile with a skipped quarter each warpgroup waits for the other's dS at a separate barrier,
// because the two run different code.
constexpr int dS_of = sums_read + stages;
static_assert(dS_of + 2 * has_quarters <= 16, "a block has 16 named barriers");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.K_pipeline.init(consumers);
  shared.V_pipeline.init(consumers);
  shared.Q_pipeline.init(consumers, 2);  // two loads per stage: Q and the row sums
  shared.dO_pipeline.init(consumers);
  shared.queue.pipeline.init(threads / warp_size - 1);  // all warps but the one that counts tiles
  fence_barrier_init();
}

// A consumer warpgroup.
struct Consumer {
  Shared& shared;
  KeyRows own;
  Scorer<float> scorer;
  Sums<depth> dK;
  Sums<width> dV;
  Operands<keeps_V ? width : step> V;  // V of the warpgroup's 64 keys, if keeps_V
  PipelineState<1> keys;
  PipelineState<stages> rows;
  PipelineState<dS_stages> dS_tile;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, const Scorer<float>& scorer)
      : shared(shared), own(warpgroup), scorer(scorer) {}

  // Computes dK and dV of a key tile.
  __device__ __forceinline__ void run(const Task& task) {
    for (float& x : dK) x = 0;
    for (float& x : dV) x = 0;
    const bool is_loaded = task.first_row < task.end_row;
    if (is_loaded) {
      shared.K_pipeline.wait(keys);
      shared.V_pipeline.wait(keys);
      if constexpr (keeps_V) load_operands(shared.V, V, own.first_key());
    }
    task.for_tiles([&](int head, int row, long long) {
      const TilePair<Br, Bc> pair = {extent_of_head(task.extent, head), row, task.first_key};
      const bool is_first = row == task.map_of(head).template from<Br>(task.first_row);
      if (is_first) shared.bias.own().load(pair, row, own.first_key());
      advance(pair, task.after(head, row));
    });
    if (!is_loaded) return;
    shared.K_pipeline.release(keys);
    shared.V_pipeline.release(keys);
    keys.advance();
  }

  // Starts the warpgroup's part of dQ = dS K: its rows, its columns, or the sum over its keys.
  template <int summed>
  __device__ __forceinline__ void begin_dQ(Sums<Layout::width>& dQ) const {
    const int first = own.warpgroup * warpgroup_rows;
    ::begin_dQ<summed>(shared.dS[dS_tile.stage], shared.K, dQ, Layout::by_rows ? first : 0,
                       Layout::count == 1 ? first : 0, Layout::by_columns ? own.warpgroup : 0);
  }

  // Processes one row tile. Tiles without masked pairs use an instance without mask tests. Two more
  // instances process tiles whose first 64 rows see none of the last 64 keys: the warpgroup that
  // owns these keys skips the rows, and the one that computes dQ of these rows skips the keys.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair, int next_row) {
    constexpr int all = Layout::count == 1 ? warpgroup_rows : Bc, half = warpgroup_rows;
    if (!is_masked(pair)) return advance<false, 0, all>(pair, next_row);
    if constexpr (has_quarters)
      if (pair.extent.kv_end(pair.first_row + half - 1) <= pair.first_key + half) {
        if (own.warpgroup == 0) return advance<true, 0, half>(pair, next_row);
        return advance<true, half, all>(pair, next_row);
      }
    advance<true, 0, all>(pair, next_row);
  }
  // Waits until both warpgroups have stored dS. compute-sanitizer requires that all threads that
  // wait at a barrier do so at the same instruction.
  template <bool whole, int warpgroup>
  __device__ __forceinline__ void meet() const {
    if constexpr (whole) {
      barrier_sync(dS_full, consuming_threads);
    } else {
      if (warpgroup == 1) barrier_arrive(dS_of + 1, consuming_threads);
      barrier_sync(dS_of + 1 - warpgroup, consuming_threads);
      if (warpgroup == 0) barrier_arrive(dS_of, consuming_threads);
    }
  }
  // Processes the tile's rows from `first` on, and sums dQ = dS K over `summed` keys.
  template <bool masks, int first, int summed>
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair, int next_row) {
    const auto& Q = shared.Q[rows.stage];
    const auto& dO = shared.dO[rows.stage];
    const TilePair<Br - first, Bc> rest = {pair.extent, pair.first_row + first, pair.first_key};
    const auto& stored = shared.sums[rows.stage];
    const SumsOfRows sums = {stored.lse2 + first, stored.delta + first};
    Sums<Br - first> S, dP;
    Sums<Layout::width> dQ;
    Operands<Br - first> P, dS;
    shared.Q_pipeline.wait(rows);
    begin_scores(shared.K, Q, S, own.warpgroup * warpgroup_rows, first);
    shared.dO_pipeline.wait(rows);
    if constexpr (keeps_V)
      begin_scores(V, dO, dP, first);
    else
      begin_scores(shared.V, dO, dP, own.warpgroup * warpgroup_rows, first);
    // The compiler may move exponentials below the wait for dP. With 128 rows, a branch keeps half
    // of them above it: a wait for a barrier that has already completed. With 64 rows, exponentials
    // are faster when interleaved with the arithmetic of dS.
    constexpr bool overlaps = Br == 128;
    const auto branch = [&] {
      if constexpr (overlaps) shared.dO_pipeline.wait(rows);
    };
    own.compute_P_and_dS<masks, overlaps>(S, dP, sums, scorer, rest, shared.bias.own(), next_row,
                                          branch);
    pack_operands<scalar>(S, P);
    pack_operands<scalar>(dP, dS);
    if (dS_stages == 1) barrier_sync(dS_empty, consuming_threads);
    store_dS(dS, shared.dS[dS_tile.stage], own, first);
    begin_output(dO, P, dV, true, first);
    fence_proxy_async();
    meet<first == 0 && summed == (Layout::count == 1 ? warpgroup_rows : Bc), (first > 0)>();
    begin_dQ<summed>(dQ);
    wgmma_wait_group<1>(dV);
    shared.dO_pipeline.release(rows);
    begin_output(Q, dS, dK, true, first);
    barrier_arrive(sums_read + rows.stage, reading_threads);
    wgmma_wait_group<1>(dQ);
    pass_part(dQ, shared.dQ[own.warpgroup], own.warpgroup);
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
    Tensor<const real> lse, const RowSums<Br>* row_sums, Part* dQ_sum, int* counts, Part* key_sums,
    Tensor<result> dQ, Tensor<result> dK, Tensor<result> dV, Sizes sizes, int heads, int kv_heads,
    int group, int splits, real scale, int batch, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (gridDim.x <= few_blocks) launch_dependents();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  const int sharing = blocks_of_group(splits), shares = kv_heads * sharing;
  const int tiles = persistent ? max(cdiv(sizes.N, Bc), 1) * shares * batch : gridDim.x;
  const int own = tile_of_block<Bc>(sizes, mods, shares);
  const auto task_of = [&](int tile) {
    return key_tile<Br, Bc, batch_first>(sizes, mods, kv_heads, group, heads, sharing, tile, tiles);
  };
  const auto own_tiles = [&](int* counter = nullptr) {
    if constexpr (persistent)
      return QueuedTiles{shared.queue, tiles, counter};
    else
      return OneTile{own};
  };
  const Task first = task_of(own);
  if (!first.extent.has_tile_of_keys(first.first_key)) {
    wait_for_launch_before();  // every block must wait
    return;
  }
  const End end = {sizes, kv_heads, dQ_sum, key_sums, counts};
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    const int warp = warp_uniform(threadIdx.x / warp_size), of = warp - 1;
    if (warp == 0)
      return produce_Q(shared, own_tiles(counts), task_of, Q_map, K_map, row_sums, sums_read);
    if (warp > consumers) return produce_dO(shared, own_tiles(), task_of, V_map, dO_map);
#pragma unroll 1
    for (auto own = own_tiles(); own.has_tile; own.advance()) {
      const Task task = task_of(own.number);
      add_dQ<Layout>(shared.dQ[of], dQ_sum, task, of, of % Layout::count, of % Layout::count + 1);
      end.leave(shared.dQ[of], shared.is_last[of], task, own.number, tiles, of);
    }
    return;
  }
  increase_registers<consumer_registers>();
  const Scorer<float> scorer = {scale, mods};
  Consumer consumer(shared, warpgroup, scorer);
#pragma unroll 1
  for (auto own = own_tiles(); own.has_tile; own.advance()) {
    const Task task = task_of(own.number);
    consumer.run(task);
    wait_for_launch_before();  // a block without row tiles has not waited yet
    const StatsOfTiles<Br> stats = {row_sums, task.number, lse, task.batch};
    const Repair<d, dv, scalar, StatsOfTiles<Br>> repair = {
        task.extent, Q, K, V, dO, stats, scorer, task.batch, task.kv_head};
    if (end.completes(consumer, task, own.number, tiles)) {
      store_or_repair<false>(consumer.dK, dK, consumer.own, task, repair);
      store_or_repair<true>(consumer.dV, dV, consumer.own, task, repair);
    }
    __syncwarp();  // reconverges, so that the next products use uniform registers
    end.finish(repair, dQ, shared.is_last, group);
  }
}
