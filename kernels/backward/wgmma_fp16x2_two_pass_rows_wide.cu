// wgmma_fp16x2_two_pass_rows_wide: `wgmma_fp16x2_two_pass_rows` with 64 rows per block, because
// shared memory holds no more. Two warpgroups process alternate key tiles, each with its own
// accumulators of dQ, which are added up at the end.
//
// dP is computed before S, so that K is needed only from S to dQ and is loaded during dP. V is
// needed only for dP. Both warpgroups share one buffer for V, but each waits at its own barrier.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   Q_high …, scale2, flags: see split_operands.cu    dO_high …, dO_units: see split_gradient.cu
//   column_bits: see column_bits.cuh    lse, delta [batch, heads, M]
//   grid (cdiv(M, 64) * heads * batch)    block (384)
//   the host sets: scalar, result, operand, real, Bk, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/register_tile.cuh>
#include <backward/parts/split_f32/load_split_stats.cuh>
#include <backward/parts/split_f32/split_gradients_wgmma.cuh>
#include <backward/parts/split_f32/store_split_dQ.cuh>
#include <ptx/named_barrier.cuh>
#include <tile/shared.cuh>

constexpr int depth = padded_columns(d);  // columns of the Q and K tiles, zero-padded
constexpr int own_rows = warpgroup_rows;
constexpr int V_boxes = cdiv(dv, box_columns);
using Pair = TilePair<own_rows, Bk>;

struct Shared {
  SplitTile<own_rows, d> Q;
  SplitTile<own_rows, dv> dO;
  SplitTile<Bk, d> K[consumers];
  SplitTile<Bk, dv> V;
  SplitStats stats[own_rows];
  float largest[own_rows];  // largest weights of the second warpgroup
  BoxPipelines<1, d> Q_pipeline;
  BoxPipelines<1, dv> dO_pipeline;
  BoxPipelines<consumers, d> K_pipeline;
  Barrier V_full[V_boxes][consumers], V_empty;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bk % step == 0, "tiles are made of whole products");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.Q_pipeline.init(1);
  shared.dO_pipeline.init(1);
  shared.K_pipeline.init(1);
  for (int i = 0; i < V_boxes * consumers; ++i)
    init_barrier(shared.V_full[i / consumers][i % consumers], 1);
  init_barrier(shared.V_empty, 1);
  fence_barrier_init();
}

// The elected producer thread loads Q and dO once, then K and V tile by tile.
__device__ __forceinline__ void produce(Shared& shared, const RowTile& task, const SplitMaps& Q,
                                        const SplitMaps& K, const SplitMaps& V, const SplitMaps& dO,
                                        int kv_head) {
  if (task.kv_begin >= task.kv_end) return;
  const int batch = task.packed_batch(task.batch);
  const int row = task.packed_row(task.row);
  PipelineState<consumers> keys;
  PipelineState<1> values;
#pragma unroll 1  // not unrolled: the producer has few registers
  for (int first_key = task.kv_begin; first_key < task.kv_end;
       first_key = task.after<Bk>(first_key), keys.advance(), values.advance()) {
    timeline::event(timeline::tile, first_key, task.row);
    const int key = task.packed_key(first_key);
    wait(shared.V_empty, values.phase ^ 1);
#pragma unroll
    for (int i = 0; i < V_boxes; ++i) {
      if (first_key == task.kv_begin)
        shared.dO_pipeline.load(shared.dO, i, dO, {}, row, task.head, batch);
      arrive_expect_tx(shared.V_full[i][keys.stage], sizeof shared.V.box[i]);
      load_split_box(shared.V, i, V, shared.V_full[i][keys.stage], key, kv_head, batch);
    }
#pragma unroll
    for (int i = 0; i < shared.K_pipeline.count; ++i) {
      if (first_key == task.kv_begin)
        shared.Q_pipeline.load(shared.Q, i, Q, {}, row, task.head, batch);
      shared.K_pipeline.load(shared.K[keys.stage], i, K, keys, key, kv_head, batch);
    }
  }
}

// A consumer warpgroup.
struct Consumer {
  Shared& shared;
  int warpgroup;
  Scorer<float> scorer;
  SplitSums<depth> dQ;
  Largest<1> largest;  // largest weight of each row
  PipelineState<consumers> keys;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, const Scorer<float>& scorer)
      : shared(shared), warpgroup(warpgroup), scorer(scorer), dQ() {}

  // Returns the positions of the thread's scores; recomputed at each use to save registers.
  __device__ __forceinline__ OwnScores<false> own() const {
    const int lane = opaque(int(threadIdx.x)) % warp_size;
    return {own_first() + lane / 4, 2 * (lane % 4)};
  }

  // Processes a key tile if it is this warpgroup's turn, or else skips it.
  __device__ __forceinline__ void advance(const Pair& pair) {
    if (keys.stage == warpgroup) add(pair);
    keys.advance();
  }
  __device__ __forceinline__ void add(const Pair& pair) {
    timeline::event(timeline::tile, pair.first_key, pair.first_row);
    const auto& K = shared.K[warpgroup];
    SplitSums<Bk> P, PS, dS;
    {
      SplitScores<Bk> gradients;
      gradients.begin(shared.dO, shared.V, [&](int i) {
        shared.dO_pipeline.box[i].wait();
        wait(shared.V_full[i][warpgroup], keys.phase);
      });
      gradients.wait(dS);
      if (threadIdx.x % warpgroup_size == 0) arrive(shared.V_empty);
    }
    SplitScores<Bk> scores;
    scores.begin(shared.Q, K, [&](int i) {
      shared.Q_pipeline.box[i].wait();
      shared.K_pipeline.box[i].wait(keys);
    });
    scores.wait(P);
    compute_P_of_tile(P, PS, shared.stats, own(), pair, scorer);
    compute_dS(dS, PS, shared.stats, own(), pair.extent.kept_factor());
    add_weighted(dS, largest, K, dQ, [&](int i, bool) { shared.K_pipeline.box[i].release(keys); });
  }

  // Combines accumulators and largest weights of both warpgroups in the first one. The second
  // passes its accumulators through the buffer of Q, which is no longer read.
  __device__ __forceinline__ void join() {
    auto& place = reinterpret_cast<RegisterTile<depth>&>(shared.Q);
    static_assert(sizeof place <= sizeof shared.Q, "the accumulators fit into Q");
    const int row = own().row, lane = threadIdx.x % warp_size;
    barrier_sync(1, consuming_threads);  // both warpgroups have read Q
    if (warpgroup == 1) {
      place.write(flat(dQ));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (lane % 4 == 0) shared.largest[row + half * 8] = largest.weight[0][half];
    }
    barrier_sync(1, consuming_threads);  // the second warpgroup's sums are written
    if (warpgroup == 1) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      largest.weight[0][half] = fmax(largest.weight[0][half], shared.largest[row + half * 8]);
    SplitSums<depth> other;
    place.read(flat(other));
#pragma unroll
    for (int i = 0; i < depth / 2; ++i) flat(dQ)[i] += flat(other)[i];
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_fp16x2_two_pass_rows_wide(
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
  consumer.join();
  if (warpgroup == 1) return;
  const long long own_head = (long long)batch * (heads / group) + kv_head;
  store_dQ<d>(consumer.dQ, consumer.largest, K_exponents + own_head * d,
              column_words(column_bits, own_head, group, 0), scale, dQ, flags, batch, head,
              first_row + own_first(), extent.M, threadIdx.x % warp_size);
}
