// wgmma_overlap: `wgmma` whose tensor cores stay busy during the softmax.
//
// In each step of the main loop a warpgroup issues S = Q K^T of this step's tile of keys together
// with O += P V of the previous tile, and computes the softmax of S while P V is still in flight.
// Warpgroups take turns issuing products (ping-pong), so that one computes exponentials while the
// tensor cores work for another. A row's maximum is raised only if a score exceeds it by more than
// `slack`, so O is rarely rescaled. A bias is loaded into shared memory one tile ahead.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (128 + 2 * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, pack_gqa, bias_bytes, d, dv,
//   threads, shared_bytes and options (extent.cuh)
#include <attention/bias_tile.cuh>
#include <attention/register_budget.cuh>
#include <attention/row_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/epilogue.cuh>
#include <forward/parts/pack_weights.cuh>
#include <forward/parts/ping_pong.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int width = cdiv(dv, step) * step;    // columns of O
constexpr int consumers = Br / warpgroup_rows;  // consumer warpgroups, besides one that loads
static_assert(Br % warpgroup_rows == 0 && Wr == step && pack_gqa == 1, "a warpgroup owns 64 rows");
static_assert(Bc % step == 0, "tiles are multiples of the MMA depth");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

using Registers = RegisterBudget<consumers, consumers == 3 ? 32 : 40>;
using Turns = PingPong<consumers>;
using Queries = TmaTile<operand, warpgroup_rows, d>;  // Q tile of one warpgroup
using Keys = TmaTile<operand, Bc, d>;
using Values = TmaTile<operand, Bc, dv>;
using Bias = OfWarps<StagedBias<bias_bytes, Bc / 8>, 4 * consumers>;
using PackedP = unsigned[Bc / step][4];  // P as operands of O += P V

struct Shared {
  Queries Q[1][consumers];
  Keys K[stages];
  Values V[stages];
  Pipeline<1> Q_pipeline[consumers];
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

// Runs in one thread of the producer warp: loads Q, then K and V tile by tile.
__device__ __forceinline__ void produce(Shared& shared, const RowTile& task, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, int kv_head) {
  const int batch = task.packed_batch(task.batch);
  for (int i = 0; i < consumers; ++i)
    load_async(shared.Q[0][i], Q, shared.Q_pipeline[i].acquire({}),
               task.packed_row(task.row + i * warpgroup_rows), task.head, batch);
  PipelineState<stages> tile;
#pragma unroll 1  // not unrolled: the producer has few registers
  for (int first_key = task.kv_begin; first_key < task.kv_end;
       first_key = task.after<Bc>(first_key), tile.advance()) {
    timeline::event(timeline::tile, first_key, task.row);
    load_async(shared.K[tile.stage], K, shared.K_pipeline.acquire(tile), task.packed_key(first_key),
               kv_head, batch);
    load_async(shared.V[tile.stage], V, shared.V_pipeline.acquire(tile), task.packed_key(first_key),
               kv_head, batch);
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
  PipelineState<1> queries;
  PipelineState<stages> keys, values;

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
    ::begin_output(shared.V[values.stage], P, flat(O));
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
    scorer.apply(S, rows, first_key, task.is_full<Bc>(first_key), shared.bias.own());
    // The scores have read this tile's bias, so that of the following tile may overwrite it.
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
  // This tile starts at `first_key`, and its K is in stage `keys`. V of the previous tile is in
  // stage `values`, and P holds its weights until P V has ended. Groups of products end in order:
  // wgmma_wait_group<1> waits for S alone.
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
  }

  template <class Finish>
  __device__ __forceinline__ void run(const RowTile& task, Finish finish) {
    rows = rows_of(task);
    shared.Q_pipeline[warpgroup].wait(queries);
    if (task.kv_begin < task.kv_end) {
      begin(task);
      for (int first_key = task.after<Bc>(task.kv_begin); first_key < task.kv_end;
           first_key = task.after<Bc>(first_key))
        advance(task, first_key);
      // P V of the last tile needs no turn. All warpgroups have the same number of tiles and turns,
      // so none waits for a turn that does not come. The last turn is passed to warpgroup 0, which
      // no longer waits; the block ends with these arrivals pending.
      begin_output();
      wgmma_wait_group<0>(flat(O));  // no later load waits for this stage
    }
    finish(O, rows, task);
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_overlap(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<result> O, Tensor<real> lse, Sizes sizes, int heads, int group,
    real scale, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  // Reversed order: under a causal mask the last rows have the most keys and should start first.
  const auto [index, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  const int row = (cdiv(extent.M, Br) - 1 - index) * Br;
  if (!extent.has_tile_of_rows(row)) return;
  const RowTile task = row_tile<Br, Bc>(extent, row, head, batch);
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, task, Q_map, K_map, V_map, head / group);
    return;
  }
  increase_registers<Registers::consumer>();
  const Scorer<real> scorer = {scale, mods};
  const Epilogue<d, dv> finish = {Q, K, V, O, lse, group, scorer};
  Consumer{shared, sizes, scorer, warpgroup}.run(task, finish);
}
