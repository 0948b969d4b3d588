// mma_fp16x2_two_pass_columns_wide: `mma_fp16x2_two_pass_columns` where dK and dV of 16 keys do not
// fit into a warp's registers. A team of four warps owns 32 keys (team_gradients.cuh): each warp
// computes a part of P^T and dS^T and accumulates some columns of dV and dK.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   Q_high …, scale2, flags: see split_operands.cu    dO_high …, dO_units: see split_gradient.cu
//   column_bits: see column_bits.cuh    lse, delta [batch, heads, M]
//   dK_flags, dV_flags [batch, kv_heads, N]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (32 * warps)
//   the host sets: scalar, result, operand, real, Br, Bc, warps, d, dv, threads, shared_bytes and
//   options (extent.cuh)
#include <attention/tile_index.cuh>
#include <backward/parts/split_f32/split_row_iterator.cuh>
#include <backward/parts/split_f32/store_split_dK_dV.cuh>
#include <backward/parts/split_f32/team_gradients.cuh>
#include <tile/shared.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles
constexpr int ahead_of_K = depth % 64 == 0 ? 4 : 1, ahead_of_V = width % 64 == 0 ? 4 : 1;
constexpr int givens = Br == step ? 1 : 2;  // 16-row tiles have one buffer for dS and P
using Given = TeamWeights<Bc, Br>;

struct Shared {  // index 0: high halves, index 1: low halves
  operand K[2][Bc][depth];
  operand V[2][Bc][width];
  operand Q[2][Br][depth];
  operand dO[2][Br][width];
  SplitStats stats[2][Br];
  Given given[givens];  // one each for dS and P, or a single buffer for both
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(warps == Bc / team_rows * team, "four warps own 32 keys");

using Loads = SplitStatsLoads<threads, Br>;
using Walk = SplitRowIterator<threads, Br, Bc, depth, width>;

// Processes one row tile: computes P^T and dS^T, then dK += dS^T Q and dV += P^T dO. On entry Q has
// arrived. Each of Q and dO is replaced while the other one is read. If `masked` is false, every
// row must see every key.
template <bool masked>
__device__ __forceinline__ void step_down(Shared& shared, Walk& walk, const TilePair<Br, Bc>& pair,
                                          TeamSums<depth>& dK, TeamSums<width>& dV,
                                          Largest<1> (&largest)[2], int turn,
                                          const Scorer<float>& scorer) {
  walk.advance();
  const bool more = walk.left > 0;
  const SplitStats(&stats)[Br] = shared.stats[turn];
  const auto scores = [](const TeamPlace& own) {
    return OwnScores<true>{own.number + 2 * (own.lane % 4), own.row + own.lane / 4};
  };
  Loads next;
  Weights P = {}, PS, dS = {};
  if (Given::has_own()) {
    const TeamPlace own;
    multiply_scores<ahead_of_K, true>(shared.K, shared.Q, P, own.row, own.lane, own.number);
    compute_P<masked>(P, PS, stats, scores(own), pair, scorer);
  }
  meet();  // dO has arrived
  if (Given::has_own()) {
    const TeamPlace own;
    multiply_scores<ahead_of_V, true>(shared.V, shared.dO, dS, own.row, own.lane, own.number);
    compute_dS(dS, PS, stats, scores(own), pair.extent.kept_factor());
    multiply_units<&SplitStats::unit>(dS, stats, scores(own));
    multiply_units<&SplitStats::dO_unit>(P, stats, scores(own));
    shared.given[0].give(dS, largest[0]);
    if (givens == 2) shared.given[1].give(P, largest[1]);
  }
  Given::meet_team();
  if (more) walk.load_stats(next);
  shared.given[0].multiply(dK, shared.Q);
  __syncthreads();  // Q and dS are no longer read
  if (more) walk.begin_Q(shared.Q);
  cp_async_commit_group();
  if (givens == 1) {
    if (Given::has_own()) shared.given[0].give(P, largest[1]);
    Given::meet_team();
  }
  shared.given[givens - 1].multiply(dV, shared.dO);
  if (more) next.store(shared.stats[1 - turn]);
  meet();  // the next Q has arrived
  if (more) walk.begin_dO(shared.dO);
  cp_async_commit_group();
}

// Stores the warp's columns of dK or dV, and the flags of keys, like SplitKeys::store().
template <bool of_V, int columns>
__device__ __forceinline__ void store_keys(Shared& shared, const TeamSums<columns>& sums,
                                           const Largest<1>& largest, const SplitKeys<d, dv>& keys,
                                           Tensor<result> gradient, Tensor<unsigned char> flags,
                                           const int* exponents, float scale, int first_key) {
  constexpr int cols = of_V ? dv : d;
  const int* own_exponents = exponents + keys.own_head * cols;
  shared.given[0].store<cols, columns>(
      sums, largest, of_V || scale != 0, of_V ? keys.extent.kept_factor() : keys.of_units(scale),
      gradient, keys.batch, keys.kv_head, first_key, keys.extent.N,
      [&](int col, bool tiny) { return keys.is_inaccurate<of_V>(col, tiny); },
      [&](int col) { return -key_exponent - own_exponents[col]; },
      [&](int key, bool wrong) { *flags.row(keys.batch, keys.kv_head, key) = wrong; });
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_fp16x2_two_pass_columns_wide(
    Tensor<const operand> Q_high, Tensor<const operand> Q_low, Tensor<const operand> K_high,
    Tensor<const operand> K_low, Tensor<const operand> V_high, Tensor<const operand> V_low,
    Tensor<const operand> dO_high, Tensor<const operand> dO_low, const int* K_exponents,
    const int* V_exponents, const unsigned* column_bits, Tensor<const real> lse,
    Tensor<const real> delta, Tensor<const real> scale2, Tensor<const real> dO_units,
    Tensor<const unsigned char> flags, Tensor<result> dK, Tensor<result> dV,
    Tensor<unsigned char> dK_flags, Tensor<unsigned char> dV_flags, Sizes sizes, int kv_heads,
    int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, kv_head, batch] = place_of_keys<Bc>(blockIdx.x, sizes, mods, kv_heads);
  const int first_key = tile * Bc;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  if (!extent.has_tile_of_keys(first_key)) return;
  const Scorer<float> scorer = {scale, mods};
  Walk walk = {{extent, first_key, kv_head, group},          Q_high,  Q_low, dO_high, dO_low,
               {lse, delta, scale2, dO_units, flags, batch}, extent.M};
  TeamSums<depth> sums_K = {};
  TeamSums<width> sums_V = {};
  Largest<1> largest[2];
  if (walk.left > 0) {
    Loads first;
    walk.load_stats(first);
    SplitHead<depth>(K_high, K_low, batch, kv_head, extent.N).copy<threads>(shared.K, first_key);
    SplitHead<width>(V_high, V_low, batch, kv_head, extent.N).copy<threads>(shared.V, first_key);
    walk.begin_Q(shared.Q);
    cp_async_commit_group();
    first.store(shared.stats[0]);
    meet();
    walk.begin_dO(shared.dO);
    cp_async_commit_group();
  }
  for (int turn = 0; walk.left > 0; turn = 1 - turn) {
    const TilePair<Br, Bc> pair = {extent_of_head(extent, walk.head), walk.first_row, first_key};
    timeline::event(timeline::tile, first_key, walk.first_row);
    if (pair.is_whole() && pair.reaches_all())
      step_down<false>(shared, walk, pair, sums_K, sums_V, largest, turn, scorer);
    else
      step_down<true>(shared, walk, pair, sums_K, sums_V, largest, turn, scorer);
  }
  const long long own_head = (long long)batch * kv_heads + kv_head;
  const SplitKeys<d, dv> keys = {column_bits, own_head, batch, kv_head, group, extent};
  store_keys<false, depth>(shared, sums_K, largest[0], keys, dK, dK_flags, K_exponents, scale,
                           first_key);
  store_keys<true, width>(shared, sums_V, largest[1], keys, dV, dV_flags, V_exponents, scale,
                          first_key);
}
