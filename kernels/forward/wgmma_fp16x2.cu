// wgmma_fp16x2: `wgmma_persistent` with float32 accuracy. Each operand is the sum of two float16
// numbers (split_pair.cuh). An earlier launch, split_operands, splits Q, K and V; P is split in
// registers. The accumulators of P V occupy the registers in which `wgmma_persistent` computes the
// next scores, so the tensor cores work for other warpgroups during a warpgroup's softmax.
//
//   O [batch, heads, M, dv]    lse [batch, heads, M]
//   Q_high …, V_exponents, scale2, flags: see split_operands.cu
//   grid (min(multiprocessors, cdiv(M, Br) * heads * batch))    block (128 + 2 * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, Q_stages, turns, pack_gqa,
//   bias_bytes, d, dv, batch_first, threads, shared_bytes and options (extent.cuh)
#include <attention/bias_tile.cuh>
#include <attention/finish_rows.cuh>
#include <attention/register_budget.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/ping_pong.cuh>
#include <forward/parts/schedule.cuh>
#include <forward/parts/split_f32/sectioned_output.cuh>
#include <forward/parts/split_f32/split_output.cuh>
#include <forward/parts/split_f32/split_softmax.cuh>
#include <forward/parts/split_f32/split_wgmma.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/shared.cuh>

constexpr int width = cdiv(dv, step) * step;    // columns of O
constexpr int consumers = Br / warpgroup_rows;  // consumer warpgroups, besides one that loads
static_assert(Br % warpgroup_rows == 0 && Wr == step && pack_gqa == 1, "a warpgroup owns 64 rows");
static_assert(Bc % step == 0, "tiles are multiples of the MMA depth");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

// turns = 1: warpgroups issue products as soon as they can. turns = 2 and 3: ping-pong, where a
// turn ends once the first columns (2) or the last columns (3) of O += P V are issued.
template <bool used>
struct TurnsOf : PingPong<consumers> {};
template <>
struct TurnsOf<false> {
  static __device__ __forceinline__ void wait(int) {}
  static __device__ __forceinline__ void arrive(int) {}
};

using Registers = RegisterBudget<consumers, consumers == 3 ? 32 : ragged ? 40 : 24>;
using Tasks = Schedule<Br, Bc, causal || has_key_tiles, batch_first, (dv > 64)>;
using Turns = TurnsOf<(turns > 1)>;
using Queries = SplitTile<warpgroup_rows, d>;  // Q tile of one warpgroup
using Keys = SplitTile<Bc, d>;
using Values = SplitTile<Bc, dv>;
using Bias = OfWarps<StagedBias<bias_bytes, Bc / 8>, 4 * consumers>;
using OwnRows = SplitRows<step, 1>;

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

template <int all_rows, int columns>
__device__ __forceinline__ void load_split(TmaTile<operand, all_rows, columns>& tile,
                                           const SplitMaps& maps, Barrier& barrier, int row,
                                           int head, int batch) {
  arrive_expect_tx(barrier, sizeof tile);
#pragma unroll
  for (int i = 0; i < tile.count; ++i) load_split_box(tile, i, maps, barrier, row, head, batch);
}

// Runs in one thread of the producer warp: for each tile of Q, loads Q, then K and V tile by tile.
__device__ __forceinline__ void produce(Shared& shared, Tasks tasks, const SplitMaps& Q,
                                        const SplitMaps& K, const SplitMaps& V, int group) {
  PipelineState<Q_stages> queries;
  PipelineState<stages> tile;
  for (; tasks.advance(); queries.advance()) {
    const auto task = tasks.task();
    const int kv_head = task.head / group, batch = task.packed_batch(task.batch);
    const auto load_queries = [&] {
#pragma unroll
      for (int i = 0; i < consumers; ++i)
        load_split(shared.Q[queries.stage][i], Q, shared.Q_pipeline[i].acquire(queries),
                   task.packed_row(task.row + i * warpgroup_rows), task.head, batch);
    };
    if (Q_stages > 1) load_queries();
#pragma unroll 1  // not unrolled: the producer has few registers
    for (int first_key = task.kv_begin; first_key < task.kv_end;
         first_key = task.after<Bc>(first_key), tile.advance()) {
      timeline::event(timeline::tile, first_key, task.row);
      load_split(shared.K[tile.stage], K, shared.K_pipeline.acquire(tile),
                 task.packed_key(first_key), kv_head, batch);
      // A single stage of Q is free only after the previous tile's last scores; K is free earlier.
      if (Q_stages == 1 && first_key == task.kv_begin) load_queries();
      load_split(shared.V[tile.stage], V, shared.V_pipeline.acquire(tile),
                 task.packed_key(first_key), kv_head, batch);
    }
  }
}

// A consumer warpgroup. During its softmax the tensor cores work for other warpgroups.
struct Consumer {
  Shared& shared;
  Sizes sizes;
  Scorer<real> scorer;
  int warpgroup;
  Tensor<const real> scale2;
  OwnRows rows = {0, {}, 0, false};  // set by begin()
  Fragments<step, width> O;
  SplitScores<Bc> scores;
  SplitOperands<Bc> P_high, P_low;
  PipelineState<Q_stages> queries;
  PipelineState<stages> keys, values;

  __device__ __forceinline__ void begin(const RowTile& task) {
    const int lane = threadIdx.x % warp_size, first = threadIdx.x / warp_size * step;
    rows = OwnRows(task.row + first - warpgroup_rows + lane / 4,  // warps 0-3 are producers
                   extent_of(sizes, scorer.mods, task.batch, task.head), scorer.scale2());
    rows.read_units(scale2, task.batch, task.head);
    for (float& x : flat(O)) x = 0;
    shared.bias.own().load(rows, task.kv_begin);
  }

  __device__ __forceinline__ void begin_scores() {
    shared.K_pipeline.wait(keys);
    Turns::wait(warpgroup);
    scores.begin(shared.Q[queries.stage][warpgroup], shared.K[keys.stage], [](int) {});
    Turns::arrive(warpgroup);
  }
  __device__ __forceinline__ void release_keys() {
    shared.K_pipeline.release(keys);
    keys.advance();
  }
  __device__ __forceinline__ void release_values() {
    shared.V_pipeline.release(values);
    values.advance();
  }

  // Turns S into the high and low parts of P. The tile's P V has to be multiplied by `weight`.
  __device__ __forceinline__ void softmax(const RowTile& task, int first_key,
                                          Fragments<step, Bc>& S, float (&weight)[1][2]) {
    const int lane = threadIdx.x % warp_size;
    shared.bias.own().complete();
    if (!ragged || rows.extent.N > 0)  // captured arrays have no elements for an empty sequence
      apply_scorer(scorer, S, rows, first_key, task.is_full<Bc>(first_key), shared.bias.own());
    if (const int next = task.after<Bc>(first_key); next < task.kv_end)
      shared.bias.own().load(rows, next);
    if (is_masked(rows.extent, task.row, Br, first_key, Bc))
      weigh<true>(S, O, rows, first_key, lane, weight);
    else
      weigh<false>(S, O, rows, first_key, lane, weight);
    split_operands(S, P_high, P_low);
  }

  // O += weight * P V.
  __device__ __forceinline__ void add_output(const float (&weight)[1][2]) {
    add_split_products(
        shared.V[values.stage], P_high, P_low, weight, O,
        [&](int part, bool is_last) {
          if (turns == 3 ? is_last : part == 0) Turns::arrive(warpgroup);
        },
        [&](int, bool is_last) {
          if (is_last) release_values();
        });
  }

  // Waits for the scores of a tile of keys, computes its softmax and adds its P V to O.
  __device__ __forceinline__ void add(const RowTile& task, int first_key, bool is_last) {
    timeline::event(timeline::tile, first_key, task.row);
    Fragments<step, Bc> S;
    float weight[1][2];
    scores.wait(S);
    release_keys();
    if (is_last) shared.Q_pipeline[warpgroup].release(queries);
    softmax(task, first_key, S, weight);
    shared.V_pipeline.wait(values);
    Turns::wait(warpgroup);
    add_output(weight);
  }

  // Skips a tile of keys that is masked for all rows of the warpgroup.
  __device__ __forceinline__ void skip() {
    shared.K_pipeline.wait(keys);
    shared.V_pipeline.wait(values);
    for (int turn = 0; turn < 2; ++turn) {
      Turns::wait(warpgroup);
      Turns::arrive(warpgroup);
    }
    barrier_sync(1 + consumers + warpgroup, warpgroup_size);  // all threads have waited for K and V
    release_keys();
    release_values();
  }

  template <class Finish>
  __device__ __forceinline__ void run(Tasks tasks, Finish finish) {
    if (!tasks.advance()) return;
    if (warpgroup == 0) Turns::arrive(consumers - 1);  // gives warpgroup 0 the first turn
    RowTile task = tasks.task();
    shared.Q_pipeline[warpgroup].wait(queries);
    begin_scores();
    for (;;) {
      begin(task);
      const int end = tasks.own_end<warpgroup_rows>(task, warpgroup, cdiv(Br, Bc));
      EarlierSums<1> earlier;
      int first_key = task.kv_begin;
      for (;;) {
        const int end_here = min(end, end_of_section(first_key));
        for (;;) {
          const int next = task.after<Bc>(first_key);
          add(task, first_key, next >= end);
          first_key = next;
          if (first_key >= end_here) break;
          begin_scores();
        }
        if (first_key >= end) break;
        finish.template add_earlier<true>(O, rows, task, earlier);
        begin_scores();
      }
      if (earlier.any) finish.template add_earlier<false>(O, rows, task, earlier);
#pragma unroll 1
      for (; first_key < task.kv_end; first_key = task.after<Bc>(first_key)) skip();
      if (!tasks.advance()) break;
      // Start computing the scores of the next Q tile before storing the current O tile.
      queries.advance();
      shared.Q_pipeline[warpgroup].wait(queries);
      begin_scores();
      finish(O, rows, task);
      task = tasks.task();
    }
    finish(O, rows, task);
  }
};

// Stores rows like store_rows(), but two columns at a time if rows are aligned to pairs of columns.
template <int cols>
__device__ __forceinline__ void store_row_pairs(const Fragments<step, width>& O,
                                                const OwnRows& rows, Tensor<result> out, int batch,
                                                int head, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.row(0, half);
    if (row >= rows.extent.M) continue;
    float* to = out.row(batch, head, row);
    const bool in_pairs =
        cols % 2 == 0 && reinterpret_cast<unsigned long long>(to) % sizeof(float2) == 0;
#pragma unroll
    for (int j = 0; j < width / 8; ++j) {
      const int col = j * 8 + 2 * (lane % 4);
      const float2 pair = {O[0][j][half * 2], O[0][j][half * 2 + 1]};
      if (in_pairs && col < cols) *reinterpret_cast<float2*>(to + col) = pair;
      if (!in_pairs && col < cols) to[col] = pair.x;
      if (!in_pairs && col + 1 < cols) to[col + 1] = pair.y;
    }
  }
}

// Normalizes and stores the rows of a tile of O, and flags inaccurate rows.
struct Epilogue {
  const int* V_exponents;
  Tensor<unsigned char> flags;
  Tensor<result> O;
  Tensor<real> lse;
  int kv_heads, group;

  template <bool moves>
  __device__ __forceinline__ void add_earlier(Fragments<step, width>& sums, OwnRows& rows,
                                              const RowTile& task, EarlierSums<1>& earlier) const {
    earlier.add<moves, dv>(sums, rows, O, lse, task.batch, task.head, threadIdx.x % warp_size);
  }

  __device__ __forceinline__ void operator()(Fragments<step, width>& sums, OwnRows& rows,
                                             const RowTile& task) const {
    const int lane = threadIdx.x % warp_size, batch = task.batch, head = task.head;
    const int* exponents = V_exponents + ((long long)batch * kv_heads + head / group) * dv;
    rows.move_maxima(weight_exponent);
    finish_rows(sums, rows, lse, batch, head, lane);
    flag_rows<dv>(sums, rows, exponents, flags, batch, head, lane);
    scale_columns<dv>(sums, exponents, lane);
    if constexpr (width > 192)  // a second store path would take too many registers
      store_rows<dv>(sums, rows, O, batch, head, lane);
    else
      store_row_pairs<dv>(sums, rows, O, batch, head, lane);
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_fp16x2(
    const __grid_constant__ TensorMap Q_high, const __grid_constant__ TensorMap Q_low,
    const __grid_constant__ TensorMap K_high, const __grid_constant__ TensorMap K_low,
    const __grid_constant__ TensorMap V_high, const __grid_constant__ TensorMap V_low,
    const int* V_exponents, Tensor<const real> scale2, Tensor<unsigned char> flags,
    Tensor<result> O, Tensor<real> lse, Sizes sizes, int heads, int group, real scale, int batch,
    int* taken, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Tasks tasks(sizes, mods, heads, batch, shared.queue);
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, tasks, {Q_high, Q_low}, {K_high, K_low}, {V_high, V_low}, group);
    tasks.take_tiles(taken);
    return;
  }
  increase_registers<Registers::consumer>();
  // Without score_mod, split_operands has folded the scale into scale2 and its sign into Q.
  const Scorer<real> scorer = {has_score_mod ? scale : real(1), mods};
  const Epilogue finish = {V_exponents, flags, O, lse, heads / group, group};
  Consumer{shared, sizes, scorer, warpgroup, scale2}.run(tasks, finish);
}
