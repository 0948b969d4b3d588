// mma_fp16x2_two_pass_rows: computes dQ of `mma_fp16x2_two_pass`. A block owns one tile of Q and
// loops over the tiles of K and V, as in `mma_fp16x2`, but also computes dO V^T and multiplies dS
// by K, not P by V. In each tile every row of dS is scaled by a power of two.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   Q_high …, scale2, flags: see split_operands.cu    dO_high …, dO_units: see split_gradient.cu
//   column_bits: see column_bits.cuh    lse, delta [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * Br / Wr)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, d, dv, threads, shared_bytes
//   and options (extent.cuh)
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/split_f32/load_split_stats.cuh>
#include <backward/parts/split_f32/store_split_dQ.cuh>
#include <forward/parts/split_f32/split_head.cuh>
#include <forward/parts/split_f32/weighted_products.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/opaque.cuh>
#include <tile/shared.cuh>
#include <tile/warp.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles
// Whether fragments of S and dP are prefetched, which is 8 % faster at d = 128. With 32 rows per
// warp at d = 64, prefetching makes ptxas spill and is 3 % slower.
constexpr bool looks_ahead = depth % 64 == 0 && width % 64 == 0 && Wr == step;
constexpr int at_once = looks_ahead ? 4 : depth > 64 ? 1 : 2;  // unroll factor of the products

struct Shared {  // index 0: high halves, index 1: low halves
  operand Q[2][Br][depth];
  operand dO[2][Br][width];
  operand K[stages][2][Bc][depth];
  operand V[stages][2][Bc][width];
  SplitStats stats[Br];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are made of whole products");

using Weights = float[Wr / step][Bc / 8][4];
using Queries = float[Wr / step][depth / 8][4];

// K and V of one head. Head addresses are recomputed for each copy rather than kept in registers.
struct Keys {
  Tensor<const operand> K_high, K_low, V_high, V_low;
  int batch, head, N;

  __device__ __forceinline__ void begin_K(Shared& shared, int first_key, int stage) const {
    SplitHead<depth>(K_high, K_low, opaque(batch), opaque(head), N)
        .copy<threads>(shared.K[stage], first_key);
  }
  __device__ __forceinline__ void begin_V(Shared& shared, int first_key, int stage) const {
    SplitHead<width>(V_high, V_low, opaque(batch), opaque(head), N)
        .copy<threads>(shared.V[stage], first_key);
  }
};

// Processes one key tile: computes P and dS, then dQ += dS K. With two stages, K and V have arrived
// on entry, and the next K and V on return. With one stage only V has arrived, and each of K and V
// is replaced while the other one is read. If `masked` is false, every row must see every key.
template <bool masked>
__device__ __forceinline__ void step_along(Shared& shared, const Keys& keys,
                                           const TilePair<Br, Bc>& pair, const RowTile& rows,
                                           int buffer, Queries& dQ, Largest<Wr / step>& largest,
                                           const Scorer<float>& scorer, int own_row, int lane) {
  const int next = rows.after<Bc>(pair.first_key);
  const bool more = next < rows.kv_end;
  if (stages == 2) {
    if (more) keys.begin_K(shared, next, 1 - buffer), keys.begin_V(shared, next, 1 - buffer);
    cp_async_commit_group();
  }
  const OwnScores<false> own = {own_row + lane / 4, 2 * (lane % 4)};
  Weights P = {}, PS, dS = {};
  multiply_scores<at_once>(shared.dO, shared.V[buffer], dS, own_row, lane);
  if (stages == 1) {
    meet();  // K has arrived, and V is no longer read
    if (more) keys.begin_V(shared, next, 0);
    cp_async_commit_group();
  }
  multiply_scores<at_once>(shared.Q, shared.K[buffer], P, own_row, lane);
  compute_P<masked>(P, PS, shared.stats, own, pair, scorer);
  compute_dS(dS, PS, shared.stats, own, pair.extent.kept_factor());
  float factor[Wr / step][2];
  largest.raise(dS, factor);
  multiply_output<looks_ahead>(shared.K[buffer], dS, dQ, factor, lane);
  meet();  // the next V has arrived; all warps are done with the current K
  if (stages == 1) {
    if (more) keys.begin_K(shared, next, 0);
    cp_async_commit_group();
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_fp16x2_two_pass_rows(
    Tensor<const operand> Q_high, Tensor<const operand> Q_low, Tensor<const operand> K_high,
    Tensor<const operand> K_low, Tensor<const operand> V_high, Tensor<const operand> V_low,
    Tensor<const operand> dO_high, Tensor<const operand> dO_low, const int* K_exponents,
    const unsigned* column_bits, Tensor<const real> lse, Tensor<const real> delta,
    Tensor<const real> scale2, Tensor<const real> dO_units, Tensor<unsigned char> flags,
    Tensor<result> dQ, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  // Reversed order: under a causal mask the longest row tiles start first.
  const int first_row = (cdiv(extent.M, Br) - 1 - tile) * Br;
  if (!extent.has_tile_of_rows(first_row)) return;
  const Scorer<float> scorer = {scale, mods};
  const RowTile rows = row_tile<Br, Bc>(extent, first_row, head, batch);
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
  const int kv_head = head / group;
  const Keys keys = {K_high, K_low, V_high, V_low, batch, kv_head, extent.N};

  SplitStatsLoads<threads, Br> loads;
  loads.load({lse,
              delta,
              scale2,
              dO_units,
              {flags.data, flags.batch_stride, flags.head_stride, flags.row_stride},
              batch},
             head, first_row, extent.M);
  SplitHead<depth>(Q_high, Q_low, batch, head, extent.M).copy<threads>(shared.Q, first_row);
  SplitHead<width>(dO_high, dO_low, batch, head, extent.M).copy<threads>(shared.dO, first_row);
  keys.begin_V(shared, rows.kv_begin, 0);
  if (stages == 2) keys.begin_K(shared, rows.kv_begin, 0);
  cp_async_commit_group();
  loads.store(shared.stats);
  meet();
  if (stages == 1) keys.begin_K(shared, rows.kv_begin, 0);
  cp_async_commit_group();
  Queries sums = {};
  Largest<Wr / step> largest;
  int buffer = 0;
  for (int first_key = rows.kv_begin; first_key < rows.kv_end;
       first_key = rows.after<Bc>(first_key)) {
    const TilePair<Br, Bc> pair = {extent, first_row, first_key};
    timeline::event(timeline::tile, first_key, first_row);
    if (pair.is_whole() && pair.reaches_all())
      step_along<false>(shared, keys, pair, rows, buffer, sums, largest, scorer, own_row, lane);
    else
      step_along<true>(shared, keys, pair, rows, buffer, sums, largest, scorer, own_row, lane);
    buffer = stages - 1 - buffer;
  }
  cp_async_wait_group<0>();  // if no row sees a key, the first copies are still in flight
  const long long own_head = (long long)batch * (heads / group) + kv_head;
  store_dQ<d>(sums, largest, K_exponents + own_head * d,
              column_words(column_bits, own_head, group, 0), scale, dQ, flags, batch, head,
              first_row + own_row, extent.M, lane);
}
