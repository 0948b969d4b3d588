// wgmma_fp16x2_two_pass_columns_wide: `wgmma_fp16x2_two_pass_columns` with two warpgroups that
// share 64 keys, as in `wgmma_two_pass_columns_wide`: the first accumulates dV, the second dK.
//
// This leaves registers for larger row tiles, which read shared memory less often.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   Q_high …: see split_operands.cu    dO_high …: see split_gradient.cu
//   column_bits: see column_bits.cuh    stats: see split_stats.cu
//   dK_flags, dV_flags [batch, kv_heads, N]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (384)
//   the host sets: scalar, result, operand, real, Br, Bc, stages, d, dv, threads, shared_bytes and
//   options (extent.cuh)
#include <backward/parts/register_tile.cuh>
#include <backward/parts/split_f32/split_key_pass.cuh>
#include <tile/shared.cuh>

constexpr int depth = padded_columns(d);   // columns of the Q and K tiles, zero-padded
constexpr int width = padded_columns(dv);  // columns of the dO and V tiles
using Task = KeyTile<Br, Bc>;
constexpr int warps = warpgroup_size / warp_size;  // warps per warpgroup
constexpr int of_dV = 0, of_dK = 1;                // consumer warpgroups for dV and for dK

struct Shared {
  SplitTile<warpgroup_rows, d> K[1];
  SplitTile<warpgroup_rows, dv> V[1];
  SplitTile<Br, d> Q[stages];
  SplitTile<Br, dv> dO[stages];
  RegisterTile<Br> P[stages];
  SplitStats stats[stages][Br];
  BoxPipelines<1, d> K_pipeline;
  BoxPipelines<1, dv> V_pipeline;
  BoxPipelines<stages, d> Q_pipeline;
  BoxPipelines<stages, dv> dO_pipeline;
  Pipeline<stages> stats_pipeline;
  Barrier P_full[stages][warps];  // a warp of the first warpgroup has written its P
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == warpgroup_rows, "two warpgroups share 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.K_pipeline.init(1);
  shared.V_pipeline.init(1);
  shared.Q_pipeline.init(consumers);
  shared.dO_pipeline.init(consumers);
  shared.stats_pipeline.init(consuming_threads);  // every thread arrives after reading P and stats
  for (int i = 0; i < stages * warps; ++i) init_barrier(shared.P_full[i / warps][i % warps], 32);
  fence_barrier_init();
}

// The first consumer warpgroup, which accumulates dV.
struct ValueConsumer {
  Shared& shared;
  Scorer<float> scorer;
  SplitSums<width> dV;
  Largest<1> largest;  // largest weight of each key
  PipelineState<stages> rows;

  __device__ __forceinline__ ValueConsumer(Shared& shared, const Scorer<float>& scorer)
      : shared(shared), scorer(scorer), dV() {}

  // Processes one row tile.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair) {
    const auto& stats = shared.stats[rows.stage];
    SplitScores<Br> scores;
    SplitSums<Br> P, PS;
    scores.begin(shared.K[0], shared.Q[rows.stage], [&](int i) {
      shared.K_pipeline.box[i].wait();
      shared.Q_pipeline.box[i].wait(rows);
    });
    scores.wait(P);
    shared.Q_pipeline.release(rows);
    shared.stats_pipeline.wait(rows);
    compute_P_of_tile(P, PS, stats, own_scores(0), pair, scorer);
    shared.P[rows.stage].write(flat(PS));
    arrive(shared.P_full[rows.stage][threadIdx.x / warp_size % warps]);
    multiply_units<&SplitStats::dO_unit>(P, stats, own_scores(0));
    shared.stats_pipeline.arrive(rows);
    for (auto& pipeline : shared.dO_pipeline.box) pipeline.wait(rows);
    add_weighted(P, largest, shared.dO[rows.stage], dV,
                 [&](int i, bool) { shared.dO_pipeline.box[i].release(rows); });
    rows.advance();
  }
};

// The second consumer warpgroup, which accumulates dK.
struct KeyConsumer {
  Shared& shared;
  SplitSums<depth> dK;
  Largest<1> largest;  // largest weight of each key
  PipelineState<stages> rows;

  __device__ __forceinline__ explicit KeyConsumer(Shared& shared) : shared(shared), dK() {}

  __device__ __forceinline__ void advance(float factor) {
    const auto& stats = shared.stats[rows.stage];
    SplitScores<Br> gradients;
    SplitSums<Br> PS, dS;
    gradients.begin(shared.V[0], shared.dO[rows.stage], [&](int i) {
      shared.V_pipeline.box[i].wait();
      shared.dO_pipeline.box[i].wait(rows);
    });
    wait(shared.P_full[rows.stage][threadIdx.x / warp_size % warps],
         rows.phase);  // Q and stats have arrived by then
    shared.P[rows.stage].read(flat(PS));
    gradients.wait(dS);
    shared.dO_pipeline.release(rows);
    compute_dS(dS, PS, stats, own_scores(0), factor);
    multiply_units<&SplitStats::unit>(dS, stats, own_scores(0));
    shared.stats_pipeline.arrive(rows);
    add_weighted(dS, largest, shared.Q[rows.stage], dK,
                 [&](int i, bool) { shared.Q_pipeline.box[i].release(rows); });
    rows.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_fp16x2_two_pass_columns_wide(
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
  const int lane = threadIdx.x % warp_size, first = task.first_key + own_first();
  if (warpgroup == of_dV) {
    ValueConsumer values(shared, scorer);
    task.for_tiles([&](int head, int row, long long) {
      values.advance({extent_of_head(task.extent, head), row, task.first_key});
    });
    keys.store<true>(values.dV, values.largest, dV, dV_flags, V_exponents, scale, first, lane);
  } else {
    KeyConsumer gradients(shared);
    task.for_tiles([&](int, int, long long) { gradients.advance(task.extent.kept_factor()); });
    keys.store<false>(gradients.dK, gradients.largest, dK, dK_flags, K_exponents, scale, first,
                      lane);
  }
}
