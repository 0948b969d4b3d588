// mma_two_pass_columns: `mma_columns` without dQ, which another pass computes.
//
// dK and dV are accumulated on chip over all rows, without atomics. The order of additions is
// fixed, so every run returns the same bits.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]
//   shared_sums, counts: used by group_shares.cuh    dS: see kept_squares.cuh
//   grid (max(cdiv(N, Bc), 1) * shares of the round, from first_block on)    block (32 * warps)
//   the host sets: scalar, result, operand, real, Br, Bc, warps, stages, keeps_dS, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/tile_index.cuh>
#include <backward/parts/group_shares.cuh>
#include <backward/parts/kept_squares.cuh>
#include <backward/parts/longest_first.cuh>
#include <backward/parts/row_range.cuh>
#include <backward/parts/row_tile_loads.cuh>
#include <backward/parts/store_or_repair.cuh>
#include <backward/parts/tile_products.cuh>
#include <ptx/cp_async.cuh>
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

using Kept = KeptSquares<Br, Bc>;
using Walk = RowTileLoads<Br, Bc, d, dv, threads>;
using Shares = GroupShares<KeyPart::Sums, ValuePart::Sums, threads>;

// Processes one row tile: computes P and dS, then dV += P^T dO and dK += dS^T Q. On entry Q and dO
// have arrived; on return copies of the next tile are in flight. If `masked` is false, every row
// must see every key.
template <bool masked>
__device__ __forceinline__ void step_down(Shared& shared, Walk& walk, const TilePair<Br, Bc>& pair,
                                          KeyPart::Sums& dK, ValuePart::Sums& dV, int turn,
                                          const Scorer<float>& scorer, const Kept& kept,
                                          int kept_tile) {
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
    if constexpr (keeps_dS) keep_dS(kept, kept_tile, dP, own, lane);
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

extern "C" __global__ __launch_bounds__(threads, 1) void mma_two_pass_columns(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, Tensor<result> dK,
    Tensor<result> dV, real* shared_sums, int* counts, operand* dS, Sizes sizes, int kv_heads,
    int group, int splits, int stride, int first_block, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Shares shares = {shared_sums, counts, splits, stride};
  const int sharing = blocks_of_group(splits);
  const int index = first_block + longest_first(blockIdx.x, gridDim.x, stride);
  const auto [tile, share, batch] = place_of_keys<Bc>(index, sizes, mods, kv_heads * sharing);
  const int kv_head = share / sharing, heads = group / sharing;
  const int first_key = tile * Bc;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  if (!extent.has_tile_of_keys(first_key)) return;
  const Scorer<float> scorer = {scale, mods};
  const int begin = row_begin(extent, first_key), end = row_end(extent, first_key, Bc);
  const int start = begin / Br * Br;
  const int tiles = end > begin ? cdiv(end - start, Br) : 0;
  const int last = start + (tiles - 1) * Br;
  const StatsInMemory stats = {lse, delta, batch};
  Walk walk = {Q,    dO,    stats, extent.M,      batch,   share * heads,
               last, start, last,  tiles * heads, &extent, first_key};
  if constexpr (has_row_tiles) {
    walk.left = tiles > 0 ? heads : 0;
    if (tiles > 0) walk.go_to(walk.map().template from<Br>(start));
  }
  const Kept kept(dS, sizes);
  // The first query head of the round, less the heads of earlier batch elements.
  const int first_head = first_block / stride * heads - batch * kv_heads * group;
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
    const int place = kept.tile(walk.head - first_head, walk.first_row / Br, tile);
    if (first_key + Bc <= extent.N && pair.reaches_all())
      step_down<false>(shared, walk, pair, sums_K, sums_V, turn, scorer, kept, place);
    else
      step_down<true>(shared, walk, pair, sums_K, sums_V, turn, scorer, kept, place);
    cp_async_wait_group<0>();
    __syncthreads();  // the next tile has arrived, and this one is no longer read
  }
  if (!shares.complete(sums_K, sums_V, index)) return;
  const Repair<d, dv, operand, StatsInMemory> repair = {extent, Q,      K,     V,      dO,
                                                        stats,  scorer, batch, kv_head};
  store_or_repair<false>(sums_K, dK, KeyPart(), repair, group, first_key, own_lane());
  store_or_repair<true>(sums_V, dV, ValuePart(), repair, group, first_key, own_lane());
}
