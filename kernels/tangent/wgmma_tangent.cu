// wgmma_tangent: `mma_tangent` with the tensor cores of Hopper (wgmma) and TMA.
//
// Roles, buffers and mbarriers are those of `wgmma`. Six products instead of two stand beside the
// same exponentials, so it suffices that warpgroups take turns to start scores: the softmax of one
// is hidden behind products of another. O and O_dot leave no registers to hold P of one tile beside
// scores of the next, as `wgmma_overlap` does. Within a warpgroup, exponentials only overlap with
// products of S_dot, which begin after those of S.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   Q_dot, K_dot, V_dot, O_dot, lse_dot: like these, with directions * batch in place of batch
//   grid (cdiv(M, Br) * heads * batch * directions)    block (128 + 2 * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, stages, d, dv, directions, moves_q,
//   moves_k, moves_v, threads, shared_bytes and options (extent.cuh)
#include <attention/register_budget.cuh>
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/pack_weights.cuh>
#include <forward/parts/ping_pong.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tangent/parts/tangent_epilogue.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int width = cdiv(dv, step) * step;    // columns of O
constexpr int consumers = Br / warpgroup_rows;  // consumer warpgroups, besides one that loads
static_assert(Br % warpgroup_rows == 0, "a warpgroup owns 64 rows");
static_assert(Bc % step == 0, "tiles are multiples of the MMA depth");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

using Registers = RegisterBudget<consumers, consumers == 3 ? 32 : 24>;
using Turns = PingPong<consumers>;
using Queries = TmaTile<operand, warpgroup_rows, d>;  // Q tile of one warpgroup
using Keys = TmaTile<operand, Bc, d>;
using Values = TmaTile<operand, Bc, dv>;
using PackedP = unsigned[Bc / step][4];  // P or P_dot as operands of products with V

// P S_dot may exceed float16 if P is larger than 1; such a row is slow, because it is recomputed.
constexpr real most_slack = is_half<operand> ? 0 : slack;

struct Shared {
  Queries Q[consumers], Q_dot[consumers];
  Keys K[stages], K_dot[stages];
  Values V[stages], V_dot[stages];
  Pipeline<1> Q_pipeline[consumers];
  Pipeline<stages> K_pipeline, V_pipeline;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  for (auto& pipeline : shared.Q_pipeline) pipeline.init(1, 1 + moves_q);  // loads
  shared.K_pipeline.init(consumers, 1 + moves_k);
  shared.V_pipeline.init(consumers, 1 + moves_v);
  fence_barrier_init();
}

struct Maps {
  const TensorMap &Q, &K, &V, &Q_dot, &K_dot, &V_dot;
};

// Runs in one thread of the producer warp: loads Q, then K and V tile by tile, each with its
// tangent.
__device__ __forceinline__ void produce(Shared& shared, const RowTile& task, const Maps& from,
                                        int its, int kv_head) {
  const int batch = task.packed_batch(task.batch);
  its = task.packed_batch(its);
  for (int i = 0; i < consumers; ++i) {
    Barrier& full = shared.Q_pipeline[i].acquire();
    const int row = task.packed_row(task.row + i * warpgroup_rows);
    load_async(shared.Q[i], from.Q, full, row, task.head, batch);
    if (moves_q) load_async(shared.Q_dot[i], from.Q_dot, full, row, task.head, its);
  }
  PipelineState<stages> tile;
#pragma unroll 1  // not unrolled: the producer has few registers
  for (int first_key = task.kv_begin; first_key < task.kv_end;
       first_key = task.after<Bc>(first_key), tile.advance()) {
    timeline::event(timeline::tile, first_key, task.row);
    const int row = task.packed_key(first_key);
    Barrier& keys = shared.K_pipeline.acquire(tile);
    load_async(shared.K[tile.stage], from.K, keys, row, kv_head, batch);
    if (moves_k) load_async(shared.K_dot[tile.stage], from.K_dot, keys, row, kv_head, its);
    Barrier& values = shared.V_pipeline.acquire(tile);
    load_async(shared.V[tile.stage], from.V, values, row, kv_head, batch);
    if (moves_v) load_async(shared.V_dot[tile.stage], from.V_dot, values, row, kv_head, its);
  }
}

// A consumer warpgroup.
struct Consumer {
  Shared& shared;
  Scorer<real> scorer;
  int warpgroup;
  TangentRows rows;
  Fragments<step, width> O = {}, O_dot = {};
  Fragments<step, Bc> S, S_dot = {};
  PackedP P, P_dot;
  PipelineState<stages> tile;

  // Processes a tile of keys. The turn orders the products of scores.
  __device__ __forceinline__ void advance(const RowTile& task, int first_key) {
    timeline::event(timeline::tile, first_key, task.row);
    shared.K_pipeline.wait(tile);
    Turns::wait(warpgroup);
    begin_scores(shared.Q[warpgroup], shared.K[tile.stage], flat(S));
    if (moves_q) begin_scores(shared.Q_dot[warpgroup], shared.K[tile.stage], flat(S_dot));
    if (moves_k)
      begin_scores(shared.Q[warpgroup], shared.K_dot[tile.stage], flat(S_dot), 0, 0, moves_q);
    Turns::arrive(warpgroup);
    const int lane = threadIdx.x % warp_size;
    // Without slopes, P is computed while products of S_dot are in flight.
    wgmma_wait_group<unit_slope ? moves_q + moves_k : 0>(flat(S));
    if constexpr (!unit_slope) read_after_here(flat(S_dot));
    apply_with_slopes(scorer, S, S_dot, rows, first_key, task.is_full<Bc>(first_key));
    if (is_masked(rows.extent, task.row, Br, first_key, Bc))
      rescale<true>(S, O, O_dot, rows, first_key, lane, most_slack);  // also masks S
    else
      rescale<false>(S, O, O_dot, rows, first_key, lane, most_slack);
    exponentiate<false>(S, rows, first_key);
    wgmma_wait_group<0>(flat(S_dot));
    shared.K_pipeline.release(tile);
    weigh(S, S_dot, 0, Bc / 8, scorer.scale, rows);
    pack_weights<operand>(flat(S), P, rows, first_key);
    pack_weights<operand>(flat(S_dot), P_dot, rows, first_key);
    shared.V_pipeline.wait(tile);
    begin_output(shared.V[tile.stage], P, flat(O));
    if (moves_scores) begin_output(shared.V[tile.stage], P_dot, flat(O_dot));
    if (moves_v) begin_output(shared.V_dot[tile.stage], P, flat(O_dot));
    wgmma_wait_group<0>(flat(O));
    read_after_here(flat(O_dot));
    shared.V_pipeline.release(tile);
    tile.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_tangent(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap Q_dot_map,
    const __grid_constant__ TensorMap K_dot_map, const __grid_constant__ TensorMap V_dot_map,
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> Q_dot, Tensor<const operand> K_dot, Tensor<const operand> V_dot,
    Tensor<result> O, Tensor<real> lse, Tensor<result> O_dot, Tensor<real> lse_dot, Sizes sizes,
    int heads, int batches, int group, real scale, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const int blocks = gridDim.x / directions, direction = blockIdx.x / blocks;
  const auto [index, head, batch] =
      place_of_rows<Br>(blockIdx.x - direction * blocks, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  // Reversed order: under a causal mask the last rows have the most keys and should start first.
  const int row = (cdiv(extent.M, Br) - 1 - index) * Br;
  if (!extent.has_tile_of_rows(row)) return;
  const RowTile task = row_tile<Br, Bc>(extent, row, head, batch);
  const int its = direction * batches + batch;  // batch element of the tangents
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    if (threadIdx.x < warp_size && elect_one()) {
      const Maps from = {Q_map, K_map, V_map, Q_dot_map, K_dot_map, V_dot_map};
      produce(shared, task, from, its, head / group);
    }
    return;
  }
  increase_registers<Registers::consumer>();
  const Scorer<real> scorer = {scale, mods};
  const int lane = threadIdx.x % warp_size, first = threadIdx.x / warp_size * step;
  const TangentRows rows(row + first - warpgroup_rows + lane / 4,  // warps 0-3 are producers
                         extent, scorer.scale2());
  Consumer consumer = {shared, scorer, warpgroup, rows};
  shared.Q_pipeline[warpgroup].wait();
  if (warpgroup == 0) Turns::arrive(consumers - 1);  // gives warpgroup 0 the first turn
  // All warpgroups have the same number of turns; the block ends with the last arrival pending.
  for (int first_key = task.kv_begin; first_key < task.kv_end;
       first_key = task.after<Bc>(first_key))
    consumer.advance(task, first_key);
  const Tangents all = {Q, K, V, Q_dot, K_dot, V_dot, O, lse, O_dot, lse_dot};
  finish<d, dv>(all, consumer.O, consumer.O_dot, consumer.rows, batch, its, head, head / group,
                scorer);
}
