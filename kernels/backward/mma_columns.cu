// mma_columns: `columns` on tensor cores, with asynchronous copies of Q and dO.
//
// For each row tile a block computes five products. Its warps divide every product so that they
// read little shared memory. P and dS pass through shared memory in 16 bits, because other warps
// read them, transposed for dV and dK. dK and dV stay in registers. dQ of each row tile is added to
// dQ_sum in global memory, in register order, four floats at a time on sm_90.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]    dQ_sum: row tiles in the layout of red.cuh
//   shared_sums, counts: used by group_shares.cuh
//   grid (max(cdiv(N, Bc), 1) * kv_heads * splits * batch)    block (32 * warps)
//   the host sets: scalar, result, operand, real, Br, Bc, warps, stages, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/tile_index.cuh>
#include <backward/parts/group_shares.cuh>
#include <backward/parts/query_partition.cuh>
#include <backward/parts/row_range.cuh>
#include <backward/parts/row_tile_loads.cuh>
#include <backward/parts/store_or_repair.cuh>
#include <backward/parts/tile_products.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/red.cuh>
#include <tile/own_lane.cuh>
#include <tile/shared.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles

struct Shared {
  operand K[Bc][depth];
  operand V[Bc][width];
  operand Q[stages][Br][depth];
  operand dO[stages][Br][width];
  operand P[Br][Bc];
  operand dS[Br][Bc];
  RowStats stats[2][Br];
};
using Loads = RowLoads<threads, Br>;
using Scores = WarpPartition<Br, Bc, warps>;
using KeyPart = WarpPartition<Bc, depth, warps>;
using ValuePart = WarpPartition<Bc, width, warps>;
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Br % step == 0 && Bc % step == 0, "tiles are made of whole products");
static_assert(Scores::whole, "warps divide S evenly");

// Unroll factors of the products S and dP, limited by registers: P occupies registers during dP,
// and tiles are largest up to d = 64.
constexpr int S_steps = depth > 64 ? 4 : 2;
constexpr int dP_steps = depth > 128 || (depth > 64 && !has_mask) ? 4 : 2;

using Walk = RowTileLoads<Br, Bc, d, dv, threads>;
using Shares = GroupShares<KeyPart::Sums, ValuePart::Sums, threads>;

// Adds dS K of a row tile to dQ_sum in global memory, one slice of columns at a time.
constexpr int query_slices = depth > 128 ? 2 : 1;
using Queries = QueryPartition<Br, depth, warps, query_slices>;

__device__ __forceinline__ void add_dQ(Shared& shared, float* dQ_sum, long long tile) {
  float* to = dQ_sum + tile * (query_slices * Queries::fours * 4 * threads);
#pragma unroll 1
  for (int slice = 0; slice < query_slices; ++slice) {
    const Queries own(slice);
    Queries::Sums dQ = {};
    multiply_tiles<false>(dQ, shared.dS, shared.K, own, own_lane());
#pragma unroll
    for (int n = 0; n < Queries::fours; ++n) {
      const int block = n % (Queries::cols / 8);
      if (own.has(block / 2))
        add_four<threads>(to, slice * Queries::fours + n, dQ[n / (Queries::cols / 8)][block]);
    }
  }
}

// Processes one row tile: computes P and dS, then dV += P^T dO and dK += dS^T Q. On entry Q and dO
// have arrived; on return copies of the next tile are in flight. If `masked` is false, every row
// must see every key.
template <bool masked>
__device__ __forceinline__ void step_down(Shared& shared, Walk& walk, const TilePair<Br, Bc>& pair,
                                          KeyPart::Sums& dK, ValuePart::Sums& dV, int turn,
                                          const Scorer<float>& scorer) {
  const int stage = stages == 2 ? turn : 0;
  walk.advance();
  const bool more = walk.left > 0;
  Loads next;
  {
    const Scores own;
    const int lane = own_lane();
    const int lane_of_P = windowed && depth > 64 ? own_lane() : lane;  // reread to save registers
    Scores::Sums S = {}, PS, dP = {};
    multiply_transposed<S_steps>(S, shared.Q[stage], shared.K, own, lane);
    // Address arithmetic for the next tile overlaps with these tensor-core products.
    if (more) walk.load_stats(next);
    if (stages == 2 && more) walk.begin_copies(shared, 1 - stage);
    cp_async_commit_group();
    compute_P<masked>(S, PS, shared.stats[turn], own, pair, scorer, lane_of_P);
    store_tile(shared.P, S, own, lane);
    multiply_transposed<dP_steps>(dP, shared.dO[stage], shared.V, own, lane);
    compute_dS(dP, PS, shared.stats[turn], own, lane, pair.extent.kept_factor());
    store_tile(shared.dS, dP, own, lane);
  }
  if (more) next.store(shared.stats[1 - turn]);
  __syncthreads();  // P and dS are written

  multiply_tiles<true>(dV, shared.P, shared.dO[stage], ValuePart(), own_lane());
  multiply_tiles<true>(dK, shared.dS, shared.Q[stage], KeyPart(), own_lane());
  if (stages == 1) {
    __syncthreads();  // before the next tile overwrites Q and dO
    if (more) walk.begin_copies(shared, 0);
    cp_async_commit_group();
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_columns(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, float* dQ_sum,
    Tensor<result> dK, Tensor<result> dV, real* shared_sums, int* counts, Sizes sizes, int kv_heads,
    int group, int splits, int stride, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Shares shares = {shared_sums, counts, splits, stride};
  const int sharing = blocks_of_group(splits);
  const auto [tile, share, batch] = place_of_keys<Bc>(blockIdx.x, sizes, mods, kv_heads * sharing);
  const int kv_head = share / sharing, heads = group / sharing;
  const int first_key = tile * Bc;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  if (!extent.has_tile_of_keys(first_key)) return;
  const Scorer<float> scorer = {scale, mods};
  const int start = row_begin(extent, first_key) / Br * Br, end = row_end(extent, first_key, Bc);
  const int tiles = end > start ? cdiv(end - start, Br) : 0;
  const int last = start + (tiles - 1) * Br;
  const StatsInMemory stats = {lse, delta, batch};
  Walk walk = {Q,    dO,    stats, extent.M,      batch,   share * heads,
               last, start, last,  tiles * heads, &extent, first_key};
  if constexpr (has_row_tiles) {
    walk.left = tiles > 0 ? heads : 0;
    if (tiles > 0) walk.go_to(walk.map().template from<Br>(start));
  }
  KeyPart::Sums sums_K = {};
  ValuePart::Sums sums_V = {};
  if (walk.left > 0) {
    Loads first;
    walk.load_stats(first);
    copy_rows<threads, d>(shared.K, Head(K, batch, kv_head, extent.N), first_key);
    copy_rows<threads, dv>(shared.V, Head(V, batch, kv_head, extent.N), first_key);
    walk.begin_copies(shared, 0);
    cp_async_commit_group();
    first.store(shared.stats[0]);
    cp_async_wait_group<0>();
    __syncthreads();  // the tiles have arrived
  }
  for (int turn = 0; walk.left > 0; turn = 1 - turn) {
    const TilePair<Br, Bc> pair = {extent_of_head(extent, walk.head), walk.first_row, first_key};
    timeline::event(timeline::tile, first_key, walk.first_row);
    const int head = walk.head;
    if (first_key + Bc <= extent.N && pair.reaches_all())
      step_down<false>(shared, walk, pair, sums_K, sums_V, turn, scorer);
    else
      step_down<true>(shared, walk, pair, sums_K, sums_V, turn, scorer);
    add_dQ(shared, dQ_sum,
           tile_of_rows<Br>(sizes, mods, batch, head, kv_heads * group, pair.first_row));
    cp_async_wait_group<0>();
    __syncthreads();  // the next tile has arrived, and this one is no longer read
  }
  if (!shares.complete(sums_K, sums_V, blockIdx.x)) return;
  const Repair<d, dv, operand, StatsInMemory> repair = {extent, Q,      K,     V,      dO,
                                                        stats,  scorer, batch, kv_head};
  store_or_repair<false>(sums_K, dK, KeyPart(), repair, group, first_key, own_lane());
  store_or_repair<true>(sums_V, dV, ValuePart(), repair, group, first_key, own_lane());
}
