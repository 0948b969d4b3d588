// wgmma_two_pass_kept_rows: computes dQ = dS K, with dS that the first pass kept in memory.
//
// A block owns 128 rows, a warpgroup 64. One warp loads tiles of K and the boxes of dS of both
// warpgroups; ldmatrix.trans loads dS from a box as an operand.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse [batch, heads, M]    row_sums [batch, heads, cdiv(M, Br)]
//   dS: query heads from first_head on, see kept_boxes.cuh
//   grid (cdiv(M, 128) * heads of the round)    block (384)
//   the host sets: scalar, result, real, Br, kept_stages, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <backward/parts/kept_boxes.cuh>
#include <backward/parts/longest_first.cuh>
#include <backward/parts/repair_rows.cuh>
#include <backward/parts/row_sums.cuh>
#include <backward/parts/store_gradient.cuh>
#include <ptx/bulk_copy.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/named_barrier.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>
#include <timeline.cuh>

constexpr int depth = cdiv(d, step) * step;  // columns of the K tiles, zero-padded
constexpr int own_rows = consumers * box_rows;
constexpr int tile_read = 1;  // the first of kept_stages named barriers: a stage has been read
constexpr int reading_threads = consuming_threads + warp_size;

struct Shared {
  TmaTile<scalar, box_keys, d> K[kept_stages];
  KeptBox dS[kept_stages][consumers];
  Barrier full[kept_stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

// The rows of a block.
struct Rows {
  Extent extent;
  int head, batch, first;

  // Returns the end of the keys that rows of a warpgroup, or of both, see.
  __device__ __forceinline__ int end_of_keys(int warpgroup) const {
    return KeptBoxes::end_of_keys(extent, first + warpgroup * box_rows);
  }
  __device__ __forceinline__ int end_of_keys() const { return max(end_of_keys(0), end_of_keys(1)); }
};

// The producer warp loads K and dS tile by tile; an elected thread issues the copies.
__device__ __forceinline__ void produce(Shared& shared, const Rows& rows, const TensorMap& K,
                                        int kv_head, const KeptBoxes& kept, int local_head) {
  const bool elected = elect_one();
  PipelineState<kept_stages> keys;
#pragma unroll 1  // not unrolled: the producer has few registers
  for (int key = 0; key < rows.end_of_keys(); key += box_keys, keys.advance()) {
    timeline::event(timeline::tile, key, rows.first);
    __syncwarp();
    if (key >= kept_stages * box_keys) barrier_sync(tile_read + keys.stage, reading_threads);
    if (!elected) continue;
    Barrier& full = shared.full[keys.stage];
    load_async(shared.K[keys.stage], K, full, rows.extent.packed_key(key), kv_head,
               rows.extent.packed_batch(rows.batch));
    int boxes = 0;
    for (int i = 0; i < consumers; ++i) boxes += key < rows.end_of_keys(i);
    arrive_expect_tx(full, boxes * sizeof(KeptBox));
    for (int i = 0; i < consumers; ++i)
      if (key < rows.end_of_keys(i))
        bulk_load(&shared.dS[keys.stage][i], &kept.box(local_head, rows.first + i * box_rows, key),
                  sizeof(KeptBox), full);
  }
}

// Computes dQ += dS K for all tiles in a consumer warpgroup.
__device__ __forceinline__ void consume(Shared& shared, const Rows& rows, int warpgroup,
                                        Sums<depth>& dQ) {
  const int warp = threadIdx.x / warp_size % 4, lane = threadIdx.x % warp_size;
  PipelineState<kept_stages> keys;
#pragma unroll 1
  for (int key = 0; key < rows.end_of_keys(); key += box_keys, keys.advance()) {
    timeline::event(timeline::tile, key, rows.first);
    wait(shared.full[keys.stage], keys.phase);
    if (key < rows.end_of_keys(warpgroup)) {
      Operands<box_keys> dS;
      shared.dS[keys.stage][warpgroup].load(dS, warp * step, lane);
      begin_output(shared.K[keys.stage], dS, dQ);
      wgmma_wait_group<0>(dQ);
    }
    barrier_arrive(tile_read + keys.stage, reading_threads);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_kept_rows(
    const __grid_constant__ TensorMap K_map, Tensor<const scalar> Q, Tensor<const scalar> K,
    Tensor<const scalar> V, Tensor<const scalar> dO, Tensor<const real> lse,
    const RowSums<Br>* row_sums, scalar* dS, Tensor<result> dQ, Sizes sizes, int heads, int group,
    int first_head, real scale, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) {
    for (Barrier& full : shared.full) init_barrier(full, 2);  // two loads: K and dS
    fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  const int row_tiles = cdiv(sizes.M, own_rows);
  const int block = longest_first(blockIdx.x, gridDim.x, row_tiles);
  const int local_head = block / row_tiles, index = first_head + local_head;
  const int head = index % heads, batch = index / heads, kv_head = head / group;
  // Reversed order: under a causal mask the longest row tiles start first.
  const int first_row = (row_tiles - 1 - block % row_tiles) * own_rows;
  const Rows rows = {extent_of(sizes, mods, batch, head), head, batch, first_row};
  wait_for_launch_before();  // the first pass has written dS
  launch_dependents();
  if (warpgroup < 0) {
    decrease_registers<producer_registers>();
    if (threadIdx.x < warp_size) produce(shared, rows, K_map, kv_head, {dS, sizes}, local_head);
    return;
  }
  increase_registers<consumer_registers>();
  Sums<depth> sums = {};
  consume(shared, rows, warpgroup, sums);
  const int lane = threadIdx.x % warp_size;
  const int first = first_row + int(threadIdx.x) / warp_size * step - warpgroup_rows;
  if (all_finite(fragments(sums))) {
    store_gradient<d>(fragments(sums), scale, dQ, batch, head, first, rows.extent.M, lane);
  } else {
    const StatsOfTiles<Br> stats = {row_sums, tiles_of<Br>(mods, batch, heads, sizes.M), lse,
                                    batch};
    const Repair<d, dv, scalar, StatsOfTiles<Br>> repair = {
        rows.extent, Q, K, V, dO, stats, {scale, mods}, batch, kv_head};
    repair_rows<depth>(repair, dQ, head, first, first + step, 0);
  }
}
