// mma_f64_columns: `mma_columns` for float64, on tensor cores.
//
// Double accumulators take twice the registers of float ones, and double tiles four times the
// shared memory of 16-bit ones, so tiles have few rows. Above d = 64 there are more warps than
// squares of 16 x 16 scores, and two or four warps share a square: half of these warps compute S,
// the other half dP. Each of four warps sums over half of the depth. The first warp adds up the
// partial sums and computes P and dS. dQ of each row tile is added to dQ_sum in global memory, in
// register order.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]    dQ_sum: row tiles in the layout of red.cuh
//   shared_sums, counts: used by group_shares.cuh
//   grid (max(cdiv(N, Bc), 1) * kv_heads * splits * batch)    block (32 * warps)
//   the host sets: scalar, result, operand, real, Br, Bc, warps, sharing, stages, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/exp2_f64.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/f64_products.cuh>
#include <backward/parts/group_shares.cuh>
#include <backward/parts/query_partition.cuh>
#include <backward/parts/repair_keys.cuh>
#include <backward/parts/row_range.cuh>
#include <backward/parts/row_tile_loads.cuh>
#include <backward/parts/store_doubles.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/red.cuh>
#include <tile/own_lane.cuh>
#include <tile/shared.cuh>
#include <timeline.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles

// The scores that a warp computes; `role` is its rank among the warps that share them.
struct Scores : WarpPartition<Br, Bc, warps / sharing> {
  int role;

  __device__ __forceinline__ Scores() {
    const int warp = opaque(int(threadIdx.x)) / warp_size, number = warp % (warps / sharing);
    role = warp / (warps / sharing);
    row = number % down * rows;
    col = number / down * cols;
  }
};

// Partial sums of S and dP from the other warps, in register order.
template <int others>
struct Exchange {
  operand parts[others][Scores::fours * 4][warps / sharing * warp_size];

  __device__ __forceinline__ void give(const Scores::Sums& part, int role) {
    constexpr int blocks = Scores::cols / 8;
#pragma unroll
    for (int i = 0; i < Scores::fours * 4; ++i)
      parts[role - 1][i][threadIdx.x % (warps / sharing * warp_size)] =
          part[i / 4 / blocks][i / 4 % blocks][i % 4];
  }
  // Adds the partial sums that the warp with this role has written.
  __device__ __forceinline__ void add(Scores::Sums& sum, int role) const {
    constexpr int blocks = Scores::cols / 8;
#pragma unroll
    for (int i = 0; i < Scores::fours * 4; ++i)
      sum[i / 4 / blocks][i / 4 % blocks][i % 4] +=
          parts[role - 1][i][threadIdx.x % (warps / sharing * warp_size)];
  }
};
template <>
struct Exchange<0> {
  __device__ __forceinline__ void give(const Scores::Sums&, int) {}
  __device__ __forceinline__ void add(Scores::Sums&, int) const {}
};

struct Shared : Exchange<sharing - 1> {
  operand K[Bc][depth];
  operand V[Bc][width];
  operand Q[stages][Br][depth];
  operand dO[stages][Br][width];
  operand P[Br][Bc];
  operand dS[Br][Bc];
  RowStats stats[2][Br];
};
using Loads = RowLoads<threads, Br>;
using KeyPart = WarpPartition<Bc, depth, warps>;
using ValuePart = WarpPartition<Bc, width, warps>;
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Br % step == 0 && Bc % step == 0, "tiles are made of whole products");
static_assert(Scores::whole && warps % sharing == 0, "warps divide S evenly");
static_assert(sharing == 1 || sharing == 2 || sharing == 4, "S and dP have two halves each");
static_assert(sizeof(operand) == 8, "these tensor-core products take float64");

using Walk = RowTileLoads<Br, Bc, d, dv, threads>;
using Shares = GroupShares<KeyPart::Sums, ValuePart::Sums, threads>;

// Adds dS K of a row tile to dQ_sum in global memory, one slice of columns at a time.
constexpr int query_slices = depth > 128 ? 2 : 1;
using Queries = QueryPartition<Br, depth, warps, query_slices>;

__device__ __forceinline__ void add_dQ(Shared& shared, real* dQ_sum, long long tile) {
  real* to = dQ_sum + tile * (query_slices * Queries::fours * 4 * threads);
#pragma unroll 1
  for (int slice = 0; slice < query_slices; ++slice) {
    const Queries own(slice);
    Queries::Sums dQ = {};
    multiply_columns<false>(dQ, shared.dS, shared.K, own, own_lane());
#pragma unroll
    for (int n = 0; n < Queries::fours; ++n) {
      const int block = n % (Queries::cols / 8);
      if (own.has(block / 2))
        add_four<threads>(to, slice * Queries::fours + n, dQ[n / (Queries::cols / 8)][block]);
    }
  }
}

// Computes the warp's part of S or dP, over only half of the depth if four warps share a square.
template <int length>
__device__ __forceinline__ void multiply_part(Scores::Sums& part, operand (&A)[Br][length],
                                              operand (&B)[Bc][length], const Scores& own) {
  constexpr int steps = length / step, half = sharing == 4 ? cdiv(steps, 2) : steps;
  const int first = own.role / 2 * half;
  multiply_rows(part, A, B, own, own_lane(), first, min(first + half, steps));
}

// Computes S and dP. Among warps that share scores, only the warp with role 0 gets the totals.
__device__ __forceinline__ void multiply_scores(Shared& shared, int stage, const Scores& own,
                                                Scores::Sums& S, Scores::Sums& dP) {
  if constexpr (sharing == 1) {
    multiply_part(S, shared.Q[stage], shared.K, own);
    multiply_part(dP, shared.dO[stage], shared.V, own);
  } else {
    if (own.role % 2 == 0)
      multiply_part(S, shared.Q[stage], shared.K, own);
    else
      multiply_part(S, shared.dO[stage], shared.V, own);
    if (own.role > 0) shared.give(S, own.role);
    __syncthreads();  // partial sums are written
    if (own.role > 0) return;
    if (sharing == 4) shared.add(S, 2);
    shared.add(dP, 1);
    if (sharing == 4) shared.add(dP, 3);
  }
}

// Processes one row tile: computes P and dS, then dV += P^T dO and dK += dS^T Q. On entry Q and dO
// have arrived; on return copies of the next tile are in flight. If `masked` is false, every row
// must see every key.
template <bool masked>
__device__ __forceinline__ void step_down(Shared& shared, Walk& walk, const TilePair<Br, Bc>& pair,
                                          KeyPart::Sums& dK, ValuePart::Sums& dV, int turn,
                                          const Scorer<real>& scorer) {
  const int stage = stages == 2 ? turn : 0;
  walk.advance();
  const bool more = walk.left > 0;
  if (stages == 2 && more) walk.begin_copies(shared, 1 - stage);
  cp_async_commit_group();
  Loads next;
  if (more) walk.load_stats(next);
  {
    const Scores own;
    Scores::Sums S = {}, PS, dP = {};
    multiply_scores(shared, stage, own, S, dP);
    if (own.role == 0) {
      compute_P<masked>(S, PS, shared.stats[turn], own, pair, scorer, own_lane());
      store_doubles(shared.P, S, own, own_lane());
      compute_dS(dP, PS, shared.stats[turn], own, own_lane(), pair.extent.kept_factor());
      store_doubles(shared.dS, dP, own, own_lane());
    }
  }
  if (more) next.store(shared.stats[1 - turn]);
  __syncthreads();  // P and dS are written

  multiply_columns<true>(dV, shared.P, shared.dO[stage], ValuePart(), own_lane());
  multiply_columns<true>(dK, shared.dS, shared.Q[stage], KeyPart(), own_lane());
  if (stages == 1) {
    __syncthreads();  // before the next tile overwrites Q and dO
    if (more) walk.begin_copies(shared, 0);
    cp_async_commit_group();
  }
}

// Stores the warp's part of dK or dV, or recomputes it if it is not finite.
template <bool of_V, class Own, class Repair>
__device__ __forceinline__ void store_or_repair(const typename Own::Sums& sums,
                                                Tensor<result> gradient, const Own& own,
                                                const Repair& repair, int group, int first_key) {
  const timeline::Phase phase(timeline::epilogue);
  const int first = first_key + own.row;
  if (all_finite(sums))
    store_gradient<of_V ? dv : d>(sums, of_V ? repair.extent.kept_factor() : repair.scorer.scale,
                                  gradient, repair.batch, repair.kv_head, first, repair.extent.N,
                                  own_lane(), own.col);
  else
    call_cold_path([=] {
      repair_keys<of_V, Own::cols>(repair, gradient, group, first, first + Own::rows, own.col);
    });
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_f64_columns(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, real* dQ_sum,
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
  const Scorer<real> scorer = {scale, mods};
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
  store_or_repair<false>(sums_K, dK, KeyPart(), repair, group, first_key);
  store_or_repair<true>(sums_V, dV, ValuePart(), repair, group, first_key);
}
