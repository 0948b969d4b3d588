// wgmma_fp16x2_two_pass_columns: `wgmma_two_pass_columns` with float32 accuracy. Each operand is
// split into two float16 numbers (split_pair.cuh).
//
// P and dS are multiplied by the powers of two that scale rows of dO and Q, and then by another
// power of two for each key and tile (split_gradients.cuh). Products of a tile start at zero and
// are added to the accumulators in registers.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   Q_high …: see split_operands.cu    dO_high …: see split_gradient.cu
//   column_bits: see column_bits.cuh    stats: see split_stats.cu
//   dK_flags, dV_flags [batch, kv_heads, N]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (384)
//   the host sets: scalar, result, operand, real, Br, Bc, stages, d, dv, threads, shared_bytes and
//   options (extent.cuh)
#include <backward/parts/split_f32/split_key_pass.cuh>
#include <tile/shared.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles
using Task = KeyTile<Br, Bc>;

struct Shared {
  SplitTile<warpgroup_rows, d> K[consumers];
  SplitTile<warpgroup_rows, dv> V[consumers];
  SplitTile<Br, d> Q[stages];
  SplitTile<Br, dv> dO[stages];
  SplitStats stats[stages][Br];
  BoxPipelines<1, d> K_pipeline;
  BoxPipelines<1, dv> V_pipeline;
  BoxPipelines<stages, d> Q_pipeline;
  BoxPipelines<stages, dv> dO_pipeline;
  Pipeline<stages> stats_pipeline;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == consumers * warpgroup_rows, "a warpgroup owns 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.K_pipeline.init(1, consumers);
  shared.V_pipeline.init(1, consumers);
  shared.Q_pipeline.init(consumers);
  shared.dO_pipeline.init(consumers);
  shared.stats_pipeline.init(consuming_threads);
  fence_barrier_init();
}

// A consumer warpgroup.
struct Consumer {
  Shared& shared;
  int warpgroup;
  Scorer<float> scorer;
  SplitSums<depth> dK;
  SplitSums<width> dV;
  Largest<1> of_K, of_V;  // largest weights for dK and dV
  PipelineState<stages> rows;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, const Scorer<float>& scorer)
      : shared(shared), warpgroup(warpgroup), scorer(scorer), dK(), dV() {}

  // Returns the positions of the thread's scores; recomputed at each use to save registers.
  __device__ __forceinline__ OwnScores<true> own() const {
    return own_scores(warpgroup * warpgroup_rows);
  }

  // Processes one row tile.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair) {
    const auto& Q = shared.Q[rows.stage];
    const auto& dO = shared.dO[rows.stage];
    const auto& stats = shared.stats[rows.stage];
    SplitScores<Br, false> scores, gradients;
    SplitSums<Br> P, PS, dS;
    scores.begin(shared.K[warpgroup], Q, [&](int i) {
      shared.K_pipeline.box[i].wait();
      shared.Q_pipeline.box[i].wait(rows);
    });
    gradients.begin(shared.V[warpgroup], dO, [&](int i) {
      shared.V_pipeline.box[i].wait();
      shared.dO_pipeline.box[i].wait(rows);
    });
    scores.wait<1>(P);
    shared.stats_pipeline.wait(rows);
    compute_P_of_tile(P, PS, stats, own(), pair, scorer);
    gradients.wait(dS);
    compute_dS(dS, PS, stats, own(), pair.extent.kept_factor());
    multiply_units<&SplitStats::dO_unit>(P, stats, own());
    multiply_units<&SplitStats::unit>(dS, stats, own());
    shared.stats_pipeline.arrive(rows);
    add_weighted(P, of_V, dO, dV, [&](int i, bool) { shared.dO_pipeline.box[i].release(rows); });
    add_weighted(dS, of_K, Q, dK, [&](int i, bool) { shared.Q_pipeline.box[i].release(rows); });
    rows.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_fp16x2_two_pass_columns(
    const __grid_constant__ TensorMap Q_high, const __grid_constant__ TensorMap Q_low,
    const __grid_constant__ TensorMap K_high, const __grid_constant__ TensorMap K_low,
    const __grid_constant__ TensorMap V_high, const __grid_constant__ TensorMap V_low,
    const __grid_constant__ TensorMap dO_high, const __grid_constant__ TensorMap dO_low,
    const int* K_exponents, const int* V_exponents, const unsigned* column_bits,
    const SplitStats* stats, Tensor<result> dK, Tensor<result> dV, Tensor<unsigned char> dK_flags,
    Tensor<unsigned char> dV_flags, Sizes sizes, int heads, int kv_heads, int group, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const Task task = key_tile<Br, Bc>(sizes, mods, kv_heads, group, heads);
  if (!task.extent.has_tile_of_keys(task.first_key)) return;
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    if (threadIdx.x < warp_size && elect_one())
      produce_rows<stages>(shared, task, {Q_high, Q_low}, {K_high, K_low}, {V_high, V_low},
                           {dO_high, dO_low}, stats);
    return;
  }
  increase_registers<consumer_registers>();
  const Scorer<float> scorer = {scale, mods};
  const long long own_head = (long long)task.batch * kv_heads + task.kv_head;
  const SplitKeys<d, dv> keys = {column_bits,  own_head, task.batch,
                                 task.kv_head, group,    task.extent};
  Consumer consumer(shared, warpgroup, scorer);
  task.for_tiles([&](int head, int row, long long) {
    consumer.advance({extent_of_head(task.extent, head), row, task.first_key});
  });
  const int lane = threadIdx.x % warp_size;
  const int first = task.first_key + warpgroup * warpgroup_rows + own_first();
  keys.store<false>(consumer.dK, consumer.of_K, dK, dK_flags, K_exponents, scale, first, lane);
  keys.store<true>(consumer.dV, consumer.of_V, dV, dV_flags, V_exponents, scale, first, lane);
}
