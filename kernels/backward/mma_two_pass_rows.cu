// mma_two_pass_rows: computes dQ. Each block owns one tile of Q and loops over the tiles of K and
// V.
//
// As in the forward pass, a warp owns its rows throughout. S and dO V^T are accumulated in
// registers, and the resulting dS stays there as an operand of dQ += dS K, so that no scores pass
// through shared memory.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * Br / Wr)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, d, dv, threads, shared_bytes
//   and options (extent.cuh)
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/cold_path.cuh>
#include <backward/parts/mma_gradients.cuh>
#include <backward/parts/repair_rows.cuh>
#include <backward/parts/store_gradient.cuh>
#include <backward/parts/tile_products.cuh>
#include <ptx/cp_async.cuh>
#include <tile/shared.cuh>
#include <timeline.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles

struct Shared {
  operand Q[Br][depth];
  operand dO[Br][width];
  operand K[stages][Bc][depth];
  operand V[stages][Bc][width];
  RowStats stats[Br];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are made of whole products");

using Scores = float[Wr / step][Bc / 8][4];      // a warp's rows of S, P or dS
using Queries = float[Wr / step][depth / 8][4];  // a warp's rows of dQ

// A warp's rows. Each warp computes its rows' scores for all keys of a tile.
struct OwnRows {
  static constexpr int col = 0;
  int row;

  __device__ __forceinline__ bool has(int) const { return true; }
};

// Computes dQ += dS K with dS in registers.
__device__ __forceinline__ void multiply_keys(const Scores& dS, operand (&K)[Bc][depth],
                                              Queries& dQ, const OwnRows& own, int lane) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float (&s)[4] = dS[i][2 * k + j / 2];
        a[i][j] = pack<operand>(s[j % 2 * 2], s[j % 2 * 2 + 1]);
      }
    }
    multiply_step(dQ, a, own, [&](unsigned (&b)[4], int n) {
      ldmatrix_trans(b, at(K, k * step + lane % 16, 2 * n + lane / 16));
    });
  }
}

// K and V of one head. Head addresses are recomputed for each copy rather than kept in registers.
struct Keys {
  Tensor<const operand> K, V;
  int batch, head, N;

  __device__ __forceinline__ void begin_copies(Shared& shared, int first_key, int stage) const {
    copy_rows<threads, d>(shared.K[stage], Head(K, opaque(batch), opaque(head), N), first_key);
    copy_rows<threads, dv>(shared.V[stage], Head(V, opaque(batch), opaque(head), N), first_key);
  }
};

// Processes one key tile: computes P and dS, then dQ += dS K. On entry K and V have arrived, and on
// return the next K and V. If `masked` is false, every row must see every key.
template <bool masked>
__device__ __forceinline__ void step_along(Shared& shared, const Keys& keys,
                                           const TilePair<Br, Bc>& pair, const RowTile& rows,
                                           int end, int buffer, Queries& dQ,
                                           const Scorer<float>& scorer, const OwnRows& own,
                                           int lane) {
  const bool more = rows.after<Bc>(pair.first_key) < end;
  if (stages == 2 && more) keys.begin_copies(shared, rows.after<Bc>(pair.first_key), 1 - buffer);
  cp_async_commit_group();
  Scores S = {}, PS, dP = {};
  multiply_transposed(S, shared.Q, shared.K[buffer], own, lane);
  compute_P<masked>(S, PS, shared.stats, own, pair, scorer, lane);
  multiply_transposed(dP, shared.dO, shared.V[buffer], own, lane);
  compute_dS(dP, PS, shared.stats, own, lane, pair.extent.kept_factor());
  multiply_keys(dP, shared.K[buffer], dQ, own, lane);
  if (stages == 1) {
    __syncthreads();  // before the next tile overwrites K and V
    if (more) keys.begin_copies(shared, rows.after<Bc>(pair.first_key), 0);
    cp_async_commit_group();
  }
  cp_async_wait_group<0>();
  __syncthreads();  // the next K and V have arrived; all warps are done with the current ones
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_two_pass_rows(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, Tensor<result> dQ,
    Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  // Reversed order: under a causal mask the longest row tiles start first.
  const int first_row = (cdiv(extent.M, Br) - 1 - tile) * Br;
  if (!extent.has_tile_of_rows(first_row)) return;
  const Scorer<float> scorer = {scale, mods};
  const RowTile rows = row_tile<Br, Bc>(extent, first_row, head, batch);
  const int lane = threadIdx.x % warp_size;
  const OwnRows own = {int(threadIdx.x) / warp_size * Wr};
  const Keys keys = {K, V, batch, head / group, extent.N};

  const StatsInMemory stats = {lse, delta, batch};
  RowLoads<threads, Br> loads;
  loads.load(stats, head, first_row, extent.M);
  copy_rows<threads, d>(shared.Q, Head(Q, batch, head, extent.M), first_row);
  copy_rows<threads, dv>(shared.dO, Head(dO, batch, head, extent.M), first_row);
  keys.begin_copies(shared, rows.kv_begin, 0);
  cp_async_commit_group();
  loads.store(shared.stats);
  cp_async_wait_group<0>();
  __syncthreads();  // the tiles have arrived
  Queries sums = {};
  int buffer = 0;
  for (int first_key = rows.kv_begin; first_key < rows.kv_end;
       first_key = rows.after<Bc>(first_key)) {
    const TilePair<Br, Bc> pair = {extent, first_row, first_key};
    timeline::event(timeline::tile, first_key, first_row);
    if (first_key + Bc <= extent.N && pair.reaches_all())
      step_along<false>(shared, keys, pair, rows, rows.kv_end, buffer, sums, scorer, own, lane);
    else
      step_along<true>(shared, keys, pair, rows, rows.kv_end, buffer, sums, scorer, own, lane);
    buffer = stages - 1 - buffer;
  }
  if (all_finite(sums)) {
    store_gradient<d>(sums, scale, dQ, batch, head, first_row + own.row, extent.M, lane);
  } else {
    const Repair<d, dv, operand, StatsInMemory> repair = {extent, Q,      K,     V,           dO,
                                                          stats,  scorer, batch, head / group};
    const int first = first_row + own.row;
    call_cold_path(
        [=, head = head] { repair_rows<depth>(repair, dQ, head, first, first + Wr, 0); });
  }
}
