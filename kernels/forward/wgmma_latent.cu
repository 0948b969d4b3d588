// wgmma_latent: all of O, up to 512 columns, in registers, and V from the tile of K that holds it.
//
// In latent attention 128 query heads share one key head, and V is the first columns of K. Two
// consumer warpgroups own the same 64 rows, and each of them half of the columns of O. They take
// turns with tiles of keys: warpgroup 0 computes S and P of even tiles, warpgroup 1 of odd ones. A
// warpgroup hands P over in shared memory, together with the maxima and sums of the rows, and both
// add the product of P and their columns of V to O. So each score is computed once, each byte of K
// is loaded once, and one warpgroup multiplies while the other one computes exponentials.
//
// If V is elsewhere in memory, a tile of V follows that of K in the same stage.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_splits, max_splits, sum_splits: results of the splits (kernels/splitting), if splits_keys
//   grid (cdiv(M * pack_gqa, Br) * num_splits * heads / pack_gqa * batch)    block (384)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, pack_gqa, splits_keys, d, dv,
//   threads, shared_bytes and options (extent.cuh)
#include <attention/key_boxes.cuh>
#include <attention/nonfinite.cuh>
#include <attention/register_budget.cuh>
#include <attention/row_softmax.cuh>
#include <attention/score.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/epilogue.cuh>
#include <forward/parts/pack_weights.cuh>
#include <forward/parts/split_tasks.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/wgmma.cuh>
#include <tile/pipeline.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup.cuh>

constexpr int consumers = 2;  // warpgroups, besides one that loads
static_assert(Br == warpgroup_rows && Wr == step, "both warpgroups own the 64 rows of the tile");
static_assert(Br % pack_gqa == 0, "a box of Q has equally many queries of each head");
static_assert(Bc % step == 0, "tiles are multiples of the MMA depth");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");
static_assert(stages == 2, "the warpgroups take turns, each with the tiles of one stage");

constexpr int queries = Br / pack_gqa;  // of each head in a tile of Q
constexpr int d_boxes = cdiv(d, box_columns);
constexpr int O_boxes = cdiv(cdiv(dv, 2), box_columns);  // boxes of V for half of the columns of O
constexpr int Wv = O_boxes * box_columns;
constexpr int boxes = d_boxes > 2 * O_boxes ? d_boxes : 2 * O_boxes;  // in a stage
static_assert(Wv <= 256, "half of O fills 128 registers of a thread");

using Registers = RegisterBudget<consumers, 24>;
using KeyBox = TmaTile<operand, Bc, box_columns>;
using OwnRows = Rows<step, pack_gqa>;

// P of a tile of keys, as operands of O += P V, and whether `factor` must rescale O before.
struct Weights {
  unsigned P[Bc / step][4];
  float factor[1][2];
  bool risen;
};

// What a thread hands over to the thread of the other warpgroup that owns the same rows.
struct Handover {
  uint4 P[Bc / step][warpgroup_size];
  float4 rows[warpgroup_size];  // two maxima and two partial sums
};

struct Shared {
  TmaTile<operand, Br, d> Q;
  KeyBox ring[stages][boxes];
  Handover handover;
  Barrier Q_full, V_full[stages], handed_over[consumers];
  Pipeline<stages, d_boxes> pipeline;
  bool is_wrong[consumers][warpgroup_size / warp_size];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

__device__ __forceinline__ void init_barriers(Shared& shared) {
  init_barrier(shared.Q_full, 1);
  for (Barrier& full : shared.V_full) init_barrier(full, 1);
  for (Barrier& handed_over : shared.handed_over) init_barrier(handed_over, warpgroup_size);
  shared.pipeline.init(consumers);
  fence_barrier_init();
}

// Returns whether tiles of K hold those of V, because V is the first columns of K in memory.
__device__ __forceinline__ bool holds(const Tensor<const operand>& K,
                                      const Tensor<const operand>& V) {
  return 2 * O_boxes <= d_boxes && dv <= d && V.data == K.data &&
         V.batch_stride == K.batch_stride && V.head_stride == K.head_stride &&
         V.row_stride == K.row_stride;
}

// Loads a tile of K. Each box has a barrier, so that products begin with the first one.
__device__ __forceinline__ void load_keys(Shared& shared, PipelineState<stages> state,
                                          const KeyBoxes& K, int first_key) {
  shared.pipeline.acquire(state);
#pragma unroll 1  // the producer has few registers
  for (int i = 0; i < d_boxes; ++i) {
    Barrier& full = shared.pipeline.full[i][state.stage];
    arrive_expect_tx(full, sizeof(KeyBox));
    K.load(shared.ring[state.stage][i], full, first_key, i * box_columns);
  }
}

__device__ __forceinline__ void load_values(Shared& shared, PipelineState<stages> state,
                                            const KeyBoxes& V, int first_key) {
  shared.pipeline.acquire(state);
  Barrier& full = shared.V_full[state.stage];
  arrive_expect_tx(full, 2 * O_boxes * sizeof(KeyBox));
#pragma unroll 1
  for (int i = 0; i < 2 * O_boxes; ++i)
    V.load(shared.ring[state.stage][i], full, first_key, i * box_columns);
}

// Runs in one thread of the producer warp: loads Q, then pairs of tiles of K, and of V if apart.
__device__ __forceinline__ void produce(Shared& shared, const Task& task, const TensorMap& Q,
                                        const KeyBoxes& K, const KeyBoxes& V, bool is_apart) {
  arrive_expect_tx(shared.Q_full, sizeof shared.Q);
  for (int i = 0; i < d_boxes; ++i)
    tma_load(shared.Q.box[i], Q, shared.Q_full, i * box_columns,
             pack_gqa > 1 ? task.head : task.row, pack_gqa > 1 ? task.row : task.head, task.batch);
  PipelineState<stages> state;
#pragma unroll 1
  for (int pair = task.kv_begin; pair < task.kv_end; pair += 2 * Bc) {
#pragma unroll 1
    for (int i = 0; i < (is_apart ? 4 : 2); ++i, state.advance()) {
      const int first_key = pair + i % 2 * Bc;
      if (first_key >= task.kv_end) continue;
      if (i < 2)
        load_keys(shared, state, K, first_key);
      else
        load_values(shared, state, V, first_key);
    }
  }
}

// A consumer warpgroup.
struct Consumer {
  Shared& shared;
  const Task& task;
  Scorer<real> scorer;
  int warpgroup;
  bool is_apart;  // V, from K
  OwnRows rows;
  Fragments<step, Wv> O = {};
  int phase = 0;  // of the barriers
  int lane = threadIdx.x % warp_size, thread = threadIdx.x % warpgroup_size;

  // S = Q K^T of the own tile. The other warpgroup does not read K if V is apart.
  __device__ __forceinline__ void multiply_scores(Fragments<step, Bc>& S) {
    const PipelineState<stages> state = {warpgroup, phase};
#pragma unroll
    for (int i = 0; i < d_boxes; ++i) {
      shared.pipeline.wait(state, i);
      wgmma_fence();
      const Matrix queries = by_rows(shared.Q.box[i]);
      const Matrix keys = by_rows(shared.ring[warpgroup][i].box);
#pragma unroll
      for (int k = 0; k < box_columns / step; ++k)
        multiply<operand>(flat(S), queries + k * wgmma_bytes, keys + k * wgmma_bytes, i + k > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>(flat(S));
    for (int i = 0; i < (is_apart ? consumers : 0); ++i) shared.pipeline.release(state);
  }

  // Returns the weights of the own tile, and hands them over.
  __device__ __forceinline__ Weights softmax(Fragments<step, Bc>& S, int first_key) {
    timeline::event(timeline::tile, first_key, task.row);
    Weights weights;
    auto& [P, factor, risen] = weights;
    scorer.apply(S, rows, first_key);
    risen = is_masked(rows.extent, task.row, queries, first_key, Bc)
                ? raise_maxima<true>(S, rows, first_key, lane, factor, slack)
                : raise_maxima<false>(S, rows, first_key, lane, factor, slack);
    rows.scale(factor);
    exponentiate<false>(S, rows, first_key);
    pack_weights<operand>(flat(S), P, rows, first_key);
    Handover& to = shared.handover;
#pragma unroll
    for (int i = 0; i < Bc / step; ++i) to.P[i][thread] = {P[i][0], P[i][1], P[i][2], P[i][3]};
    const auto &maximum = rows.maximum[0], &sum = rows.sum[0];
    to.rows[thread] = {maximum[0], maximum[1], sum[0], sum[1]};
    arrive(shared.handed_over[warpgroup]);
    return weights;
  }

  // Takes over the weights of the other warpgroup's tile. A thread writes its place in the handover
  // only after it has read what the other thread wrote there.
  __device__ __forceinline__ Weights take_weights() {
    wait(shared.handed_over[1 - warpgroup], phase);
    Weights weights;
    const Handover& from = shared.handover;
#pragma unroll
    for (int i = 0; i < Bc / step; ++i) {
      const uint4 x = from.P[i][thread];
      unsigned (&p)[4] = weights.P[i];
      p[0] = x.x, p[1] = x.y, p[2] = x.z, p[3] = x.w;
    }
    const auto [first, second, first_sum, second_sum] = from.rows[thread];
    float (&maximum)[2] = rows.maximum[0], (&sum)[2] = rows.sum[0];
    weights.risen = __any_sync(full_warp, first != maximum[0] || second != maximum[1]);
    weights.factor[0][0] = exp2f(maximum[0] - first), maximum[0] = first, sum[0] = first_sum;
    weights.factor[0][1] = exp2f(maximum[1] - second), maximum[1] = second, sum[1] = second_sum;
    return weights;
  }

  // Starts O += P V of the tile in a stage. Its V has arrived: with the scores that made P, if K
  // holds V.
  __device__ __forceinline__ void begin_output(int stage, const Weights& weights) {
    if (weights.risen) scale_rows(O, weights.factor);
    if (is_apart) wait(shared.V_full[stage], phase);
    const Matrix values = by_columns(shared.ring[stage][warpgroup * O_boxes].box, Bc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Bc / step; ++k)
      multiply<operand>(flat(O), weights.P[k], values + k * step * box_row_bytes, true);
    wgmma_commit_group();
  }
  __device__ __forceinline__ void end_output(int stage) {
    wgmma_wait_group<0>(flat(O));
    shared.pipeline.release({stage, phase});
  }

  // Warpgroup 0: multiplies its tile of each pair, then that of warpgroup 1.
  __device__ __forceinline__ void run_first() {
#pragma unroll 1
    for (int pair = task.kv_begin; pair < task.kv_end; pair += 2 * Bc, phase ^= 1) {
      Fragments<step, Bc> S = {};
      multiply_scores(S);
      begin_output(0, softmax(S, pair));
      end_output(0);
      if (pair + Bc >= task.kv_end) break;
      begin_output(1, take_weights());
      end_output(1);
    }
  }

  // Warpgroup 1: computes scores of its tile before it takes over the weights of the other one, and
  // its own weights while O += P V of the other tile is in flight.
  __device__ __forceinline__ void run_second() {
#pragma unroll 1
    for (int pair = task.kv_begin; pair < task.kv_end; pair += 2 * Bc, phase ^= 1) {
      const int first_key = pair + Bc;
      Fragments<step, Bc> S = {};
      if (first_key < task.kv_end) multiply_scores(S);
      begin_output(0, take_weights());
      if (first_key >= task.kv_end) {
        end_output(0);
        break;
      }
      const Weights own = softmax(S, first_key);
      end_output(0);
      begin_output(1, own);
      end_output(1);
    }
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_latent(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<result> O, Tensor<real> lse, float* O_splits, float* max_splits,
    float* sum_splits, int num_splits, Sizes sizes, int heads, int group, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_launch_before();
  const KeySplits splits(O_splits, max_splits, sum_splits, num_splits);
  const Task task = task_at<queries, Bc, pack_gqa>(blockIdx.x, sizes, mods, heads, splits);
  if (!task.exists) return;
  const int kv_head = task.head / group;
  const bool is_apart = !holds(K, V);
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, task, Q_map, {K_map, mods, task, kv_head}, {V_map, mods, task, kv_head},
              is_apart);
    return;
  }
  increase_registers<Registers::consumer>();
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size % 4;
  const Scorer<real> scorer = {scale, mods};
  const OwnRows own(task.row * pack_gqa + warp * step + lane / 4,
                    extent_of(sizes, mods, task.batch, task.head), scorer.scale2(),
                    task.split == 0);
  Consumer consumer = {shared, task, scorer, warpgroup, is_apart, own};
  wait(shared.Q_full, 0);
  if (warpgroup == 0)
    consumer.run_first();
  else
    consumer.run_second();

  auto& sums = consumer.O;
  const auto& rows = consumer.rows;
  const int first_col = warpgroup * Wv, head = task.head / pack_gqa;
  if (splits.store<dv>(sums, rows, task.split, task.batch * heads + task.head, sizes.M, lane,
                       first_col))
    return;
  shared.is_wrong[warpgroup][warp] = needs_repair(sums, rows);
  barrier_sync(1, consumers * warpgroup_size);  // before a warpgroup reads the other one's flags
  if (!shared.is_wrong[0][warp] && !shared.is_wrong[1][warp]) {
    finish_rows(sums, rows, lse, task.batch, head, lane, warpgroup == 0);
    store_output<dv>(sums, rows, O, task.batch, head, lane, first_col);
  } else if (warpgroup == 0) {
    repair_rows<d, dv>(Q, rows_of(K, mods), rows_of(V, mods), O, lse, rows, task.batch, head,
                       kv_head, scorer);
  }
}
