// wgmma_fp16x2_two_pass_rows: `wgmma_two_pass_rows` with float32 accuracy. A block owns 128 rows of
// dQ and loops over the tiles of K and V. Each operand is split into two float16 numbers, and each
// row of dS is scaled by a power of two in each tile.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   Q_high …, scale2, flags: see split_operands.cu    dO_high …, dO_units: see split_gradient.cu
//   column_bits: see column_bits.cuh    lse, delta [batch, heads, M]
//   grid (cdiv(M, 128) * heads * batch)    block (384)
//   the host sets: scalar, result, operand, real, Bk, stages, V_stages, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/split_f32/load_split_stats.cuh>
#include <backward/parts/split_f32/split_gradients_wgmma.cuh>
#include <backward/parts/split_f32/store_split_dQ.cuh>
#include <tile/shared.cuh>

constexpr int depth = cdiv(d, step) * step;  // columns of the Q and K tiles, zero-padded
constexpr int own_rows = consumers * warpgroup_rows;
using Pair = TilePair<own_rows, Bk>;

struct Shared {
  SplitTile<warpgroup_rows, d> Q[consumers];
  SplitTile<warpgroup_rows, dv> dO[consumers];
  SplitTile<Bk, d> K[stages];
  SplitTile<Bk, dv> V[V_stages];
  SplitStats stats[own_rows];
  BoxPipelines<1, d> Q_pipeline;
  BoxPipelines<1, dv> dO_pipeline;
  BoxPipelines<stages, d> K_pipeline;
  BoxPipelines<V_stages, dv> V_pipeline;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bk % step == 0, "tiles are made of whole products");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.Q_pipeline.init(1, consumers);
  shared.dO_pipeline.init(1, consumers);
  shared.K_pipeline.init(consumers);
  shared.V_pipeline.init(consumers);
  fence_barrier_init();
}

template <int stages, int all_rows, int columns>
__device__ __forceinline__ void load_boxes(BoxPipelines<stages, columns>& pipelines,
                                           TmaTile<operand, all_rows, columns>& tile,
                                           const SplitMaps& maps, PipelineState<stages> state,
                                           int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < tile.count; ++i) pipelines.load(tile, i, maps, state, row, head, batch);
}

// The elected producer thread loads Q and dO once, then K and V tile by tile.
__device__ __forceinline__ void produce(Shared& shared, const RowTile& task, const SplitMaps& Q,
                                        const SplitMaps& K, const SplitMaps& V, const SplitMaps& dO,
                                        int kv_head) {
  if (task.kv_begin >= task.kv_end) return;
  const int batch = task.packed_batch(task.batch);
#pragma unroll
  for (int i = 0; i < consumers; ++i) {
    const int row = task.packed_row(task.row + i * warpgroup_rows);
    load_boxes(shared.Q_pipeline, shared.Q[i], Q, PipelineState<1>(), row, task.head, batch);
    load_boxes(shared.dO_pipeline, shared.dO[i], dO, PipelineState<1>(), row, task.head, batch);
  }
  PipelineState<stages> keys;
  PipelineState<V_stages> values;
#pragma unroll 1  // not unrolled: the producer has few registers
  for (int first_key = task.kv_begin; first_key < task.kv_end;
       first_key = task.after<Bk>(first_key), keys.advance(), values.advance()) {
    timeline::event(timeline::tile, first_key, task.row);
    const int key = task.packed_key(first_key);
    load_boxes(shared.K_pipeline, shared.K[keys.stage], K, keys, key, kv_head, batch);
    load_boxes(shared.V_pipeline, shared.V[values.stage], V, values, key, kv_head, batch);
  }
}

// A consumer warpgroup.
struct Consumer {
  Shared& shared;
  int warpgroup;
  Scorer<float> scorer;
  SplitSums<depth> dQ;
  Largest<1> largest;  // largest weight of each row
  PipelineState<stages> keys;
  PipelineState<V_stages> values;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, const Scorer<float>& scorer)
      : shared(shared), warpgroup(warpgroup), scorer(scorer), dQ() {}

  // Returns the positions of the thread's scores; recomputed at each use to save registers.
  __device__ __forceinline__ OwnScores<false> own() const {
    const int lane = opaque(int(threadIdx.x)) % warp_size;
    return {warpgroup * warpgroup_rows + own_first() + lane / 4, 2 * (lane % 4)};
  }

  // Processes one key tile.
  __device__ __forceinline__ void advance(const Pair& pair) {
    timeline::event(timeline::tile, pair.first_key, pair.first_row);
    const auto& K = shared.K[keys.stage];
    SplitScores<Bk> scores, gradients;
    SplitSums<Bk> P, PS, dS;
    scores.begin(shared.Q[warpgroup], K, [&](int i) {
      shared.Q_pipeline.box[i].wait();
      shared.K_pipeline.box[i].wait(keys);
    });
    scores.wait(P);
    gradients.begin(shared.dO[warpgroup], shared.V[values.stage], [&](int i) {
      shared.dO_pipeline.box[i].wait();
      shared.V_pipeline.box[i].wait(values);
    });
    compute_P_of_tile(P, PS, shared.stats, own(), pair, scorer);
    gradients.wait(dS);
    shared.V_pipeline.release(values);
    compute_dS(dS, PS, shared.stats, own(), pair.extent.kept_factor());
    add_weighted(dS, largest, K, dQ, [&](int i, bool) { shared.K_pipeline.box[i].release(keys); });
    keys.advance();
    values.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_fp16x2_two_pass_rows(
    const __grid_constant__ TensorMap Q_high, const __grid_constant__ TensorMap Q_low,
    const __grid_constant__ TensorMap K_high, const __grid_constant__ TensorMap K_low,
    const __grid_constant__ TensorMap V_high, const __grid_constant__ TensorMap V_low,
    const __grid_constant__ TensorMap dO_high, const __grid_constant__ TensorMap dO_low,
    const int* K_exponents, const unsigned* column_bits, Tensor<const real> lse,
    Tensor<const real> delta, Tensor<const real> scale2, Tensor<const real> dO_units,
    Tensor<unsigned char> flags, Tensor<result> dQ, Sizes sizes, int heads, int group, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  const auto [tile, head, batch] = place_of_rows<own_rows>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  // Reversed order: under a causal mask the longest row tiles start first.
  const int first_row = (cdiv(extent.M, own_rows) - 1 - tile) * own_rows;
  if (!extent.has_tile_of_rows(first_row)) return;
  const RowTile task = row_tile<own_rows, Bk>(extent, first_row, head, batch);
  const int kv_head = head / group, warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  SplitStatsLoads<threads, own_rows> loads;
  loads.load({lse,
              delta,
              scale2,
              dO_units,
              {flags.data, flags.batch_stride, flags.head_stride, flags.row_stride},
              batch},
             head, first_row, extent.M);
  loads.store(shared.stats);
  __syncthreads();  // stats and barriers are ready
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, task, {Q_high, Q_low}, {K_high, K_low}, {V_high, V_low}, {dO_high, dO_low},
              kv_head);
    return;
  }
  increase_registers<consumer_registers>();
  const Scorer<float> scorer = {scale, mods};
  Consumer consumer(shared, warpgroup, scorer);
#pragma unroll 1
  for (int first_key = task.kv_begin; first_key < task.kv_end;
       first_key = task.after<Bk>(first_key))
    consumer.advance({extent, first_row, first_key});
  const long long own_head = (long long)batch * (heads / group) + kv_head;
  const int first = first_row + warpgroup * warpgroup_rows + own_first();
  store_dQ<d>(consumer.dQ, consumer.largest, K_exponents + own_head * d,
              column_words(column_bits, own_head, group, 0), scale, dQ, flags, batch, head, first,
              extent.M, threadIdx.x % warp_size);
}
