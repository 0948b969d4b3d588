// wgmma: the tensor cores of Hopper, fed by a dedicated warp (warp specialization).
//
// One thread of the producer warp issues TMA loads of Q, then of tiles of K and V, up to `stages`
// ahead. Each consumer warpgroup owns 64 rows and multiplies them with operands straight from
// shared memory; only P is in registers. mbarriers in shared memory signal which buffers are full
// and which are empty again, so the main loop needs no barrier across the block. The fragments of S
// and O, and the softmax, are those of `mma_split_q`.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (128 + 2 * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, pack_gqa, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/register_budget.cuh>
#include <attention/row_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/epilogue.cuh>
#include <forward/parts/pack_weights.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int width = cdiv(dv, step) * step;    // columns of O
constexpr int consumers = Br / warpgroup_rows;  // consumer warpgroups, besides one that loads
static_assert(Br % warpgroup_rows == 0 && Wr == step && pack_gqa == 1, "a warpgroup owns 64 rows");
static_assert(Bc % step == 0, "tiles are multiples of the MMA depth");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

using Registers = RegisterBudget<consumers, consumers == 3 ? 32 : 40>;
using Queries = TmaTile<operand, warpgroup_rows, d>;  // Q tile of one warpgroup
using Keys = TmaTile<operand, Bc, d>;
using Values = TmaTile<operand, Bc, dv>;
using PackedP = unsigned[Bc / step][4];  // P as operands of O += P V

struct Shared {
  Queries Q[1][consumers];
  Keys K[stages];
  Values V[stages];
  Pipeline<1> Q_pipeline[consumers];
  Pipeline<stages> K_pipeline, V_pipeline;
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

// A consumer warpgroup.
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

  // Starts S = Q K^T of the tile in stage `keys`.
  __device__ __forceinline__ void begin_scores() {
    shared.K_pipeline.wait(keys);
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

  // Turns S into P in float32 and rescales O.
  __device__ __forceinline__ void softmax(const RowTile& task, int first_key) {
    const int lane = threadIdx.x % warp_size;
    scorer.apply(S, rows, first_key, task.is_full<Bc>(first_key));
    if (is_masked(rows.extent, task.row, Br, first_key, Bc))
      rescale<true>(S, O, rows, first_key, lane);  // also masks S
    else
      rescale<false>(S, O, rows, first_key, lane);
    exponentiate<false>(S, rows, first_key);
  }

  // Processes a tile of keys: S = Q K^T, P = softmax(S), O += P V.
  __device__ __forceinline__ void advance(const RowTile& task, int first_key) {
    timeline::event(timeline::tile, first_key, task.row);
    begin_scores();
    wgmma_wait_group<0>(flat(S));
    release_keys();
    softmax(task, first_key);
    pack_weights<operand>(flat(S), P, rows, first_key);
    begin_output();
    wgmma_wait_group<0>(flat(O));
    release_values();
  }

  template <class Finish>
  __device__ __forceinline__ void run(const RowTile& task, Finish finish) {
    rows = rows_of(task);
    shared.Q_pipeline[warpgroup].wait(queries);
    for (int first_key = task.kv_begin; first_key < task.kv_end;
         first_key = task.after<Bc>(first_key))
      advance(task, first_key);
    finish(O, rows, task);
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma(
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
