// wgmma_two_pass_rows: computes dQ. A block owns 128 rows and loops over the tiles of K and V.
//
// S = Q K^T and dP = dO V^T are accumulated in registers, and dS stays there as an operand of dQ +=
// dS K. Nothing is exchanged through shared memory, and no atomics are needed.
//
// The launch overlaps with wgmma_two_pass_columns: both only read row sums.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse [batch, heads, M]    row_sums [batch, heads, cdiv(M, Br)]
//   grid (cdiv(M, 128) * heads * batch)    block (384)
//   the host sets: scalar, result, real, Br, Bk, stages, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <backward/parts/gradient_warpgroups.cuh>
#include <backward/parts/longest_first.cuh>
#include <backward/parts/repair_rows.cuh>
#include <backward/parts/row_sums.cuh>
#include <backward/parts/sees_distance.cuh>
#include <backward/parts/store_gradient.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/opaque.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>
#include <timeline.cuh>

constexpr int depth = cdiv(d, step) * step;  // columns of the Q and K tiles, zero-padded
constexpr int own_rows = consumers * warpgroup_rows;

struct Shared {
  TmaTile<scalar, own_rows, d> Q;
  TmaTile<scalar, own_rows, dv> dO;
  TmaTile<scalar, Bk, d> K[stages];
  TmaTile<scalar, Bk, dv> V[stages];
  Pipeline<1> Q_pipeline, dO_pipeline;
  Pipeline<stages, 2> pipeline;  // full[0] for K, full[1] for V
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bk % step == 0, "tiles are made of whole products");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.Q_pipeline.init(1);
  shared.dO_pipeline.init(1);
  shared.pipeline.init(consumers);
  fence_barrier_init();
}

// The elected producer thread loads Q and dO once, then K and V tile by tile.
__device__ __forceinline__ void produce(Shared& shared, const RowTile& task, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        int kv_head) {
  if (task.kv_begin >= task.kv_end) return;
  load_async(shared.Q, Q, shared.Q_pipeline.acquire(), task.packed_row(task.row), task.head,
             task.packed_batch(task.batch));
  load_async(shared.dO, dO, shared.dO_pipeline.acquire(), task.packed_row(task.row), task.head,
             task.packed_batch(task.batch));
  PipelineState<stages> keys;
#pragma unroll 1  // not unrolled: the producer has few registers
  for (int first_key = task.kv_begin; first_key < task.kv_end;
       first_key = task.after<Bk>(first_key), keys.advance()) {
    timeline::event(timeline::tile, first_key, task.row);
    load_async(shared.K[keys.stage], K, shared.pipeline.acquire(keys), task.packed_key(first_key),
               kv_head, task.packed_batch(task.batch));
    load_async(shared.V[keys.stage], V, shared.pipeline.full[1][keys.stage],
               task.packed_key(first_key), kv_head, task.packed_batch(task.batch));
  }
}

// The thread's two rows.
struct OwnRows {
  int first;  // the second one is first + 8
  float lse2[2], delta[2];
};

// Sets P of masked pairs to 0. The mask depends only on the distance of the key from the row, so it
// is cheaper than calling Extent::sees for every pair.
__device__ __forceinline__ void mask(Sums<Bk>& P, const OwnRows& rows, int first_key,
                                     const Extent& extent) {
  const int key = first_key + 2 * (opaque(int(threadIdx.x)) % 4);
  const int distance = key - opaque(rows.first);
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) {
    const int more = i / 4 * 8 + i % 2, down = i / 2 % 2 * 8;
    const bool seen = key + more < extent.N && sees_distance(extent, distance + more - down);
    if (!seen) P[i] = 0;
  }
}

// Replaces S with PS: P = 2^(S * scale2 - lse2) times the derivative of the score modification.
__device__ __forceinline__ void compute_PS(Sums<Bk>& S, const OwnRows& rows,
                                           const Scorer<float>& scorer, const RowTile& task,
                                           int first_key, const Extent& extent) {
  const timeline::Phase phase(timeline::softmax, Bk / 2);
  const bool is_full = task.is_full<Bk>(first_key);
  const int own_key = first_key + 2 * (threadIdx.x % 4);
  extent.cap(S, scorer.scale);
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) {
    const Index row = index_of<true>(rows.first, i / 2 % 2 * 8, extent.M);
    const Index key = index_of<true>(own_key, i / 4 * 8 + i % 2, extent.N);
    const auto [exponent, slope] = scorer.exponent_with_slope<caps_tiles>(S[i], extent, row, key);
    const float p = exp2f(exponent - rows.lse2[i / 2 % 2]);
    S[i] = !is_full && extent.hides(row, key) ? 0 : score_gradient(p, 1.0f, slope);
  }
  if (is_masked(extent, task.row, own_rows, first_key, Bk)) mask(S, rows, first_key, extent);
  mark(S, extent, rows.first, own_key);
}

// Replaces dP with the unscaled dS = PS * (dP - delta).
__device__ __forceinline__ void compute_dS(const Sums<Bk>& PS, Sums<Bk>& dP, const OwnRows& rows,
                                           float factor) {
  const timeline::Phase phase(timeline::softmax, Bk / 2);
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i)
    dP[i] = weighted_gradient(PS[i], dP[i], rows.delta[i / 2 % 2], factor);
}

// Accumulates dQ in a consumer warpgroup.
__device__ __forceinline__ void consume(Shared& shared, const RowTile& task, int warpgroup,
                                        const OwnRows& rows, Sums<depth>& dQ, const Extent& extent,
                                        const Scorer<float>& scorer) {
  if (task.kv_begin >= task.kv_end) return;
  PipelineState<stages> keys;
  shared.Q_pipeline.wait();
  shared.dO_pipeline.wait();
#pragma unroll 1
  for (int first_key = task.kv_begin; first_key < task.kv_end;
       first_key = task.after<Bk>(first_key), keys.advance()) {
    timeline::event(timeline::tile, first_key, task.row);
    const auto& K = shared.K[keys.stage];
    Sums<Bk> S, dP;
    Operands<Bk> dS;
    shared.pipeline.wait(keys);
    begin_scores(shared.Q, K, S, warpgroup * warpgroup_rows);
    shared.pipeline.wait(keys, 1);
    begin_scores(shared.dO, shared.V[keys.stage], dP, warpgroup * warpgroup_rows);
    wgmma_wait_group<1>(S);
    compute_PS(S, rows, scorer, task, first_key, extent);
    wgmma_wait_group<0>(dP);
    compute_dS(S, dP, rows, extent.kept_factor());
    pack_operands<scalar>(dP, dS);
    begin_output(K, dS, dQ);
    wgmma_wait_group<0>(dQ);
    shared.pipeline.release(keys);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_rows(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const real> lse, const RowSums<Br>* row_sums, Tensor<result> dQ, Sizes sizes, int heads,
    int group, real scale, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  const int block = longest_first(blockIdx.x, gridDim.x, max(cdiv(sizes.M, own_rows), 1));
  const auto [tile, head, batch] = place_of_rows<own_rows>(block, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  const Scorer<float> scorer = {scale, mods};
  // Reversed order: under a causal mask the longest row tiles start first.
  const int first_row = (cdiv(extent.M, own_rows) - 1 - tile) * own_rows;
  const bool has_rows = extent.has_tile_of_rows(first_row);
  const int kv_head = head / group;
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    if (has_rows && threadIdx.x < warp_size && elect_one())
      produce(shared, row_tile<own_rows, Bk>(extent, first_row, head, batch), Q_map, K_map, V_map,
              dO_map, kv_head);
    return;
  }
  if (has_rows) {
    increase_registers<consumer_registers>();
    const RowTile task = row_tile<own_rows, Bk>(extent, first_row, head, batch);
    const int lane = threadIdx.x % warp_size;
    const int first = task.row + int(threadIdx.x) / warp_size * step - warpgroup_rows;
    OwnRows rows = {first + lane / 4};
    const StatsOfTiles<Br> stats = {row_sums, tiles_of<Br>(mods, batch, heads, sizes.M), lse,
                                    batch};
    // This launch has not waited for the previous one, so L1 may hold row sums of an earlier call.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.first + half * 8;
      const RowSums<Br>* sums = row_sums + stats.number(head, row);
      rows.lse2[half] = row < extent.M ? __ldcg(&sums->lse2[row % Br]) : infinity;
      rows.delta[half] = row < extent.M ? __ldcg(&sums->delta[row % Br]) : 0;
    }
    Sums<depth> sums = {};
    consume(shared, task, warpgroup, rows, sums, extent, scorer);
    if (all_finite(fragments(sums))) {
      store_gradient<d>(fragments(sums), scale, dQ, batch, head, first, extent.M, lane);
    } else {
      wait_for_launch_before();  // repairs read row sums with ordinary loads
      const Repair<d, dv, scalar, StatsOfTiles<Br>> repair = {extent, Q,      K,     V,      dO,
                                                              stats,  scorer, batch, kv_head};
      repair_rows<depth>(repair, dQ, head, first, first + step, 0);
    }
  }
  // Nothing above depends on the end of the previous launch, but this launch must not end earlier.
  if (blockIdx.x == gridDim.x - 1) wait_for_launch_before();
}
