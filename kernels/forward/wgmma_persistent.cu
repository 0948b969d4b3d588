// wgmma_persistent: `wgmma_overlap` with persistent blocks.
//
// Each multiprocessor has one block, which loads the next tile of Q and starts its scores before it
// stores the current one: tensor cores are idle neither in a tile's prologue nor in its epilogue.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (min(multiprocessors, cdiv(M, Br) * heads * batch))    block (128 + 2 * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, pack_gqa, bias_bytes, d, dv,
//   Q_stages, batch_first, threads, shared_bytes and options (extent.cuh)
#include <attention/bias_tile.cuh>
#include <attention/register_budget.cuh>
#include <attention/row_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/epilogue.cuh>
#include <forward/parts/pack_weights.cuh>
#include <forward/parts/ping_pong.cuh>
#include <forward/parts/schedule.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int width = cdiv(dv, step) * step;    // columns of O
constexpr int consumers = Br / warpgroup_rows;  // consumer warpgroups, besides one that loads
static_assert(Br % warpgroup_rows == 0 && Wr == step && pack_gqa == 1, "a warpgroup owns 64 rows");
static_assert(Bc % step == 0, "tiles are multiples of the MMA depth");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

using Registers = RegisterBudget<consumers, consumers == 3 ? 32 : 40>;
using Tasks = Schedule<Br, Bc, causal || has_key_tiles, batch_first, (dv > 64)>;
using Turns = PingPong<consumers>;
using Queries = TmaTile<operand, warpgroup_rows, d>;  // Q tile of one warpgroup
using Keys = TmaTile<operand, Bc, d>;
using Values = TmaTile<operand, Bc, dv>;
using Bias = OfWarps<StagedBias<bias_bytes, Bc / 8>, 4 * consumers>;
using PackedP = unsigned[Bc / step][4];  // P as operands of O += P V

struct Shared {
  Queries Q[Q_stages][consumers];
  Keys K[stages];
  Values V[stages];
  Tasks::Queue queue;
  Pipeline<Q_stages> Q_pipeline[consumers];
  Pipeline<stages> K_pipeline, V_pipeline;
  Bias bias;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  for (auto& pipeline : shared.Q_pipeline) pipeline.init(1);
  shared.K_pipeline.init(consumers);
  shared.V_pipeline.init(consumers);
  fence_barrier_init();
}

// Runs in one thread of the producer warp: for each tile of Q, loads Q, then K and V tile by tile.
__device__ __forceinline__ void produce(Shared& shared, Tasks tasks, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, int group) {
  PipelineState<Q_stages> queries;
  PipelineState<stages> tile;
  for (; tasks.advance(); queries.advance()) {
    const auto task = tasks.task();
    const int kv_head = task.head / group, batch = task.packed_batch(task.batch);
    const auto load_queries = [&] {
#pragma unroll
      for (int i = 0; i < consumers; ++i)
        load_async(shared.Q[queries.stage][i], Q, shared.Q_pipeline[i].acquire(queries),
                   task.packed_row(task.row + i * warpgroup_rows), task.head, batch);
    };
    if (Q_stages > 1) load_queries();
#pragma unroll 1  // not unrolled: the producer has few registers
    for (int first_key = task.kv_begin; first_key < task.kv_end;
         first_key = task.after<Bc>(first_key), tile.advance()) {
      timeline::event(timeline::tile, first_key, task.row);
      load_async(shared.K[tile.stage], K, shared.K_pipeline.acquire(tile),
                 task.packed_key(first_key), kv_head, batch);
      // A single stage of Q is free only after the previous tile's last scores; K is free earlier.
      if (Q_stages == 1 && first_key == task.kv_begin) load_queries();
      load_async(shared.V[tile.stage], V, shared.V_pipeline.acquire(tile),
                 task.packed_key(first_key), kv_head, batch);
    }
  }
}

// A consumer warpgroup. While it computes the softmax of a tile, the tensor cores work on O += P V
// of the previous tile, and for other warpgroups.
struct Consumer {
  Shared& shared;
  Sizes sizes;
  Scorer<real> scorer;
  int warpgroup;
  Rows<step> rows = {0, {}, 0, false};  // set by run()
  Fragments<step, width> O = {};
  Fragments<step, Bc> S;
  PackedP P;
  PipelineState<Q_stages> queries;
  PipelineState<stages> keys, values;
  bool added = false;  // whether O already holds sums of this tile of Q

  __device__ __forceinline__ Rows<step> rows_of(const RowTile& task) const {
    const int lane = threadIdx.x % warp_size, first = threadIdx.x / warp_size * step;
    return Rows<step>(task.row + first - warpgroup_rows + lane / 4,  // warps 0-3 are producers
                      extent_of(sizes, scorer.mods, task.batch, task.head), scorer.scale2());
  }

  // Waits for the warpgroup's turn, then starts S = Q K^T of the tile in stage `keys`.
  __device__ __forceinline__ void begin_scores() {
    shared.K_pipeline.wait(keys);
    Turns::wait(warpgroup);
    ::begin_scores(shared.Q[queries.stage][warpgroup], shared.K[keys.stage], flat(S));
  }
  __device__ __forceinline__ void begin_output() {
    shared.V_pipeline.wait(values);
    ::begin_output(shared.V[values.stage], P, flat(O), added);
  }
  __device__ __forceinline__ void release_keys() {
    shared.K_pipeline.release(keys);
    keys.advance();
  }
  __device__ __forceinline__ void release_values() {
    shared.V_pipeline.release(values);
    values.advance();
  }

  // Turns S into P in float32. Returns whether O must be rescaled by `factor`.
  __device__ __forceinline__ bool softmax(const RowTile& task, int first_key,
                                          float (&factor)[1][2]) {
    const int lane = threadIdx.x % warp_size;
    shared.bias.own().complete();
    if (!ragged || rows.extent.N > 0)  // captured arrays have no elements for an empty sequence
      scorer.apply(S, rows, first_key, task.is_full<Bc>(first_key), shared.bias.own(first_key));
    if (const int next = task.after<Bc>(first_key); next < task.kv_end)
      shared.bias.own().load(rows, next);
    const bool risen = is_masked(rows.extent, task.row, Br, first_key, Bc)
                           ? raise_maxima<true>(S, rows, first_key, lane, factor, slack)
                           : raise_maxima<false>(S, rows, first_key, lane, factor, slack);
    rows.scale(factor);
    exponentiate<false>(S, rows, first_key);
    return risen;
  }

  // Prologue: computes P of the first tile of keys; no P V is in flight yet.
  __device__ __forceinline__ void begin(const RowTile& task) {
    timeline::event(timeline::tile, task.kv_begin, task.row);
    float factor[1][2];
    shared.bias.own().load(rows, task.kv_begin);
    if (warpgroup == 0) Turns::arrive(consumers - 1);  // gives warpgroup 0 the first turn
    begin_scores();
    Turns::arrive(warpgroup);
    wgmma_wait_group<0>(flat(S));
    release_keys();
    softmax(task, task.kv_begin, factor);
    pack_weights<operand>(flat(S), P, rows, task.kv_begin);
  }

  // Main loop step: computes P of this tile, while O += P V of the previous tile is in flight.
  __device__ __forceinline__ void advance(const RowTile& task, int first_key) {
    timeline::event(timeline::tile, first_key, task.row);
    float factor[1][2];
    begin_scores();
    begin_output();
    Turns::arrive(warpgroup);
    wgmma_wait_group<1>(flat(S));
    release_keys();
    const bool risen = softmax(task, first_key, factor);
    wgmma_wait_group<0>(flat(O));  // until here P V reads P and writes O
    release_values();
    pack_weights<operand>(flat(S), P, rows, first_key);
    if (risen) scale_rows(O, factor);
    added = true;
  }

  // Issues the last O += P V and the scores of the next tile of Q, and stores O meanwhile.
  template <class Finish>
  __device__ __forceinline__ void advance(RowTile& task, Tasks& tasks, int skips, Finish finish) {
    float factor[1][2];
    begin_output();
    queries.advance();
    shared.Q_pipeline[warpgroup].wait(queries);
    begin_scores();
    Turns::arrive(warpgroup);
    const RowTile next = tasks.task();
    timeline::event(timeline::tile, next.kv_begin, next.row);
    wgmma_wait_group<1>(flat(O));
    release_values();
    skip_values(skips);
    finish(O, rows, task);
    rows = rows_of(next);
    shared.bias.own().load(rows, next.kv_begin, next.head == task.head && next.row == task.row);
    wgmma_wait_group<0>(flat(S));
    release_keys();
    softmax(next, next.kv_begin, factor);
    pack_weights<operand>(flat(S), P, rows, next.kv_begin);
    added = false;
    task = next;
  }

  __device__ __forceinline__ void skip_values(int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      shared.V_pipeline.wait(values);
      barrier_sync(1 + consumers + warpgroup, warpgroup_size);  // all threads have waited for V
      release_values();
    }
  }

  template <class Finish>
  __device__ __forceinline__ void run(Tasks tasks, Finish finish) {
    if (!tasks.advance()) return;
    RowTile task = tasks.task();
    rows = rows_of(task);
    shared.Q_pipeline[warpgroup].wait(queries);
    begin(task);
    for (;;) {
      // Skips at most stages - 1 tiles: one stage of V stays occupied until the next Q has arrived.
      const int end = tasks.own_end<warpgroup_rows>(task, warpgroup, stages - 1);
      int first_key = task.after<Bc>(task.kv_begin), skips = 0;
      for (; first_key < end; first_key = task.after<Bc>(first_key)) advance(task, first_key);
      shared.Q_pipeline[warpgroup].release(queries);
#pragma unroll 1
      for (; first_key < task.kv_end; first_key = task.after<Bc>(first_key), ++skips) {
        shared.K_pipeline.wait(keys);
        Turns::wait(warpgroup);
        Turns::arrive(warpgroup);
        release_keys();
      }
      if (!tasks.advance()) break;
      advance(task, tasks, skips, finish);
    }
    begin_output();
    wgmma_wait_group<0>(flat(O));
    release_values();  // so that the producer can finish
    finish(O, rows, task);
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_persistent(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<result> O, Tensor<real> lse, Sizes sizes, int heads, int group,
    real scale, int batch, int* taken, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Tasks tasks(sizes, mods, heads, batch, shared.queue);
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    if (threadIdx.x < warp_size && elect_one()) produce(shared, tasks, Q_map, K_map, V_map, group);
    tasks.take_tiles(taken);
    return;
  }
  increase_registers<Registers::consumer>();
  const Scorer<real> scorer = {scale, mods};
  const Epilogue<d, dv> finish = {Q, K, V, O, lse, group, scorer};
  Consumer{shared, sizes, scorer, warpgroup}.run(tasks, finish);
}
