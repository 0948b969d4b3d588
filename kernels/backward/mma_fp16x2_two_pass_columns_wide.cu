// mma_fp16x2_two_pass_columns_wide: `mma_fp16x2_two_pass_columns` where dK and dV of 16 keys do not
// fit into the registers of a warp. Four warps own 32 keys. Of P and dS of a tile each computes 16
// keys and 16 rows (two of them do if a tile has only 16 rows), and gives them to the others as
// parts, with a power of two for each key. Each then adds its 64 columns of dV += P^T dO and dK +=
// dS^T Q.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   Q_high …, scale2, flags: see split_operands.cu    dO_high …, dO_units: see split_gradient.cu
//   row_maxima: see part_maxima.cu    lse, delta [batch, heads, M]
//   dK_flags, dV_flags [batch, kv_heads, N]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (32 * warps)
//   the host sets: scalar, operand, real, Br, Bc, warps, row_slabs (those of row_maxima), d, dv,
//   threads, shared_bytes and options (score.cuh)
#include <backward/parts/half_gradients.cuh>
#include <backward/parts/part_keys.cuh>
#include <backward/parts/walk_down.cuh>
#include <forward/parts/part_products.cuh>
#include <forward/parts/parts_head.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/opaque.cuh>
#include <tile/shared.cuh>
#include <tile/warp.cuh>

constexpr int depth = cdiv(d, step) * step;   // of Q and K, filled up with zeros
constexpr int width = cdiv(dv, step) * step;  // of dO and V
constexpr int team = 4;                       // warps of 32 keys
constexpr int own_columns = 64;               // of a warp, of dK and of dV
constexpr int ahead_of_K = depth % 64 == 0 ? 4 : 1, ahead_of_V = width % 64 == 0 ? 4 : 1;
constexpr int givens = Br == step ? 1 : 2;  // tiles of 16 rows are for little shared memory

struct alignas(16) Registers {
  unsigned of[4];
};
// Weights of a tile, as operands of each lane, and the factors of their keys' sums.
struct Given {
  Registers parts[Bc / step][Br / step][2][warp_size];  // high, low
  float factors[Br / step][Bc];
};
struct Shared {  // high parts, then low ones
  operand K[2][Bc][depth];
  operand V[2][Bc][width];
  operand Q[2][Br][depth];
  operand dO[2][Br][width];
  PartStats stats[2][Br];
  Given given[givens];  // dS and P, or one after the other
  unsigned char wrong[team][Bc];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Br == step || Br == 2 * step, "a warp has 16 rows");
static_assert(Bc % (2 * step) == 0 && warps == Bc / (2 * step) * team, "four warps own 32 keys");
static_assert(own_columns / step % 2 == 0, "what is loaded last has the first place");
static_assert(depth <= team * own_columns && width <= team * own_columns, "each column has a warp");

using Weights = float[1][2][4];
using Sums = float[2][own_columns / 8][4];

using Loads = PartLoads<threads, Br>;
// The arrays of rows, and the tiles of them that the block goes through.
struct Walk : WalkDown<Br, Bc> {
  Tensor<const operand> Q_high, Q_low, dO_high, dO_low;
  PartStatsInMemory stats;
  int M;

  // The addresses of heads are computed here again: registers do not keep them.
  __device__ __forceinline__ void begin_Q(Shared& shared) const {
    PartsHead<depth>(Q_high, Q_low, opaque(stats.batch), opaque(head), M)
        .copy<threads>(shared.Q, first_row);
  }
  __device__ __forceinline__ void begin_dO(Shared& shared) const {
    PartsHead<width>(dO_high, dO_low, opaque(stats.batch), opaque(head), M)
        .copy<threads>(shared.dO, first_row);
  }
  __device__ __forceinline__ void load_stats(Loads& loads) const {
    loads.load(stats, opaque(head), first_row, M);
  }
};

// All that was copied is there for all threads, and what they have read may be overwritten.
__device__ __forceinline__ void meet() {
  cp_async_wait_group<0>();
  __syncthreads();
}

// What a warp owns: 16 keys and rows of each tile of weights, and columns of sums of 32 keys.
struct Own {
  int key, row, col, group, lane;

  __device__ __forceinline__ Own() {
    const int warp = opaque(int(threadIdx.x)) / warp_size, turn = warp % team;
    group = warp / team;
    key = group * 2 * step + turn / 2 * step;
    row = turn % 2 * step;
    col = turn * own_columns;
    lane = threadIdx.x % warp_size;
  }
  __device__ __forceinline__ OwnScores<true> scores() const {
    return {row + 2 * (lane % 4), key + lane / 4};
  }
};

// Whether the warp computes weights.
__device__ __forceinline__ bool has_weights() {
  return Br == 2 * step || Own().row < Br;
}

// What warps gave others of the same keys is there.
__device__ __forceinline__ void meet_team() {
  barrier_sync(1 + Own().group, team * warp_size);
}

// The place of a lane's key, of the first two in four lanes.
__device__ __forceinline__ float& key_factor(Given& of, const Own& own) {
  return of.factors[own.row / step][own.key + own.lane / 4 + own.lane % 4 * 8];
}

// Gives the warps of the same keys a warp's weights.
__device__ __forceinline__ void give(Given& to, Weights& weights, Largest<1>& largest,
                                     const Own& own) {
  float factor[1][2];
  largest.raise(weights, factor);
  Registers(&parts)[2][warp_size] = to.parts[own.key / step][own.row / step];
  Registers high, low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&pair)[4] = weights[0][i / 2];
    split_pair<operand>(pair[i % 2 * 2], pair[i % 2 * 2 + 1], high.of[i], low.of[i]);
  }
  parts[0][own.lane] = high;
  parts[1][own.lane] = low;
  if (own.lane % 4 < 2) key_factor(to, own) = factor[0][own.lane % 4 == 1];
}

// sums += A^T B of a tile, of weights of 32 keys for the warp's columns of B.
template <int columns>
__device__ __forceinline__ void add_given(Sums& sums, const Given& given,
                                          operand (&B)[2][Br][columns]) {
  const Own own;
  constexpr int across = own_columns / step;
  constexpr bool whole = columns == team * own_columns;
  if (!whole && own.col >= columns) return;
  ChunkAddresses values(B[0], own.lane % 16, own.col / in_chunk + own.lane / 16);
  unsigned B_high[2][4], B_low[2][4];  // of a step, and of the next
  const auto has = [&](int j) { return whole || own.col + j * step < columns; };
  const auto load = [&](int i, int j) {
    if (!has(j)) return;
    ldmatrix_trans(B_high[i], values(0, j * 2));
    ldmatrix_trans(B_low[i], values(Br, j * 2));
  };
  load(0, 0);
#pragma unroll 1
  for (int k = 0; k < Br / step; ++k) {
    unsigned high[2][4], low[2][4];
    float factor[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = own.group * 2 + i;
      const Registers a = given.parts[key][k][0][own.lane], b = given.parts[key][k][1][own.lane];
#pragma unroll
      for (int e = 0; e < 4; ++e) high[i][e] = a.of[e], low[i][e] = b.of[e];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factor[i][half] = given.factors[k][key * step + half * 8 + own.lane / 4];
    }
#pragma unroll
    for (int j = 0; j < across; ++j) {
      // From the last columns on to the next rows, or back to the first ones, which are not used.
      constexpr int down = step * columns * int(sizeof(operand));
      if (j == across - 1) values.first.bytes += k + 1 < Br / step ? down : -k * down;
      load((j + 1) % 2, (j + 1) % across);
      if (!has(j)) continue;
      float main[2][2][4] = {};
      LowSums<2, 2, false> C;
      multiply_parts(main, C, 0, high, low, B_high[j % 2], B_low[j % 2]);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = i / 8, half = i / 4 % 2, e = i % 4;
        float& x = sums[row][2 * j + half][e];
        x = fmaf(fmaf(C(row, half, e), low_unit, main[row][half][e]), factor[row][e / 2], x);
      }
    }
  }
}

// One tile of rows: P^T and dS^T, then dK += dS^T Q and dV += P^T dO. Q is there when it begins.
// Each of Q and dO is replaced while the other one is read. Unless it is `masked` every row sees
// every key.
template <bool masked>
__device__ __forceinline__ void step_down(Shared& shared, Walk& walk, const TilePair<Br, Bc>& pair,
                                          Sums& dK, Sums& dV, Largest<1> (&largest)[2], int turn,
                                          const Scorer<float>& scorer) {
  walk.advance();
  const bool more = walk.left > 0;
  const PartStats(&stats)[Br] = shared.stats[turn];
  Loads next;
  Weights P = {}, PS, dP = {};
  if (has_weights()) {
    const Own own;
    multiply_scores<ahead_of_K, true>(shared.K, shared.Q, P, own.key, own.lane, own.row);
    compute_P<masked>(P, PS, stats, own.scores(), pair, scorer);
  }
  meet();  // dO is there
  if (has_weights()) {
    const Own own;
    multiply_scores<ahead_of_V, true>(shared.V, shared.dO, dP, own.key, own.lane, own.row);
    compute_dS(dP, PS, stats, own.scores(), pair.extent.kept_factor());
    multiply_units<&PartStats::unit>(dP, stats, own.scores());
    multiply_units<&PartStats::dO_unit>(P, stats, own.scores());
    give(shared.given[0], dP, largest[0], own);
    if (givens == 2) give(shared.given[1], P, largest[1], own);
  }
  meet_team();  // dS of the keys is there
  if (more) walk.load_stats(next);
  add_given(dK, shared.given[0], shared.Q);
  __syncthreads();  // Q and dS are no longer read
  if (more) walk.begin_Q(shared);
  cp_async_commit_group();
  if (givens == 1) {
    if (has_weights()) give(shared.given[0], P, largest[1], Own());
    meet_team();
  }
  add_given(dV, shared.given[givens - 1], shared.dO);
  if (more) next.store(shared.stats[1 - turn]);
  meet();  // the next Q is there
  if (more) walk.begin_dO(shared);
  cp_async_commit_group();
}

// Stores the warp's columns of dK, or of dV, and the flags of their keys.
template <bool of_V, int row_slabs>
__device__ __forceinline__ void store_keys(Shared& shared, const Sums& sums,
                                           const Largest<1>& largest,
                                           const PartKeys<d, dv, row_slabs>& keys,
                                           Tensor<scalar> gradient, Tensor<unsigned char> flags,
                                           const int* exponents, float scale, int first_key) {
  constexpr int cols = of_V ? dv : d;
  const Own own;
  const int* own_exponents = exponents + keys.own_head * cols;
  const auto numbers = [&](int col) { return keys.has_numbers(of_V ? d + col : col); };
  const int first = own.group * 2 * step;
  Given& given = shared.given[0];
  if (has_weights() && own.lane % 4 < 2)
    key_factor(given, own) = largest.weight[0][own.lane % 4 == 1];
  __syncthreads();  // the largest weights are there
  Largest<2> of_keys;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = first + i * 8 + own.lane / 4;
    float& weight = of_keys.weight[i / 2][i % 2];
    for (int k = 0; k < Br / step; ++k) weight = fmax(weight, given.factors[k][key]);
    const float least = !of_V && scale == 0 ? 0 : of_keys.least_sum(i / 2, i % 2);
    const bool wrong =
        own.col < cols && is_wrong<cols>(sums, i / 2, i % 2, least, own.lane, numbers, own.col);
    if (own.lane % 4 == 0) shared.wrong[own.col / own_columns][key] = wrong;
  }
  const float factor = of_V ? keys.kept_factor : has_score_text ? scale : float(ln2);
  store_scaled<cols>(
      sums, factor, gradient, keys.batch, keys.kv_head, first_key + first, keys.N, own.lane,
      [&](int col) { return -key_exponent - own_exponents[col]; }, own.col);
  __syncthreads();  // what is wrong is known
  for (int key = threadIdx.x; key < Bc && first_key + key < keys.N; key += threads) {
    bool wrong = false;
    for (int i = 0; i < team; ++i) wrong |= shared.wrong[i][key] != 0;
    *flags.row(keys.batch, keys.kv_head, first_key + key) = wrong;
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_fp16x2_two_pass_columns_wide(
    Tensor<const operand> Q_high, Tensor<const operand> Q_low, Tensor<const operand> K_high,
    Tensor<const operand> K_low, Tensor<const operand> V_high, Tensor<const operand> V_low,
    Tensor<const operand> dO_high, Tensor<const operand> dO_low, const int* K_exponents,
    const int* V_exponents, const float* row_maxima, Tensor<const real> lse,
    Tensor<const real> delta, Tensor<const real> scale2, Tensor<const real> dO_units,
    Tensor<const unsigned char> flags, Tensor<scalar> dK, Tensor<scalar> dV,
    Tensor<unsigned char> dK_flags, Tensor<unsigned char> dV_flags, Sizes sizes, int kv_heads,
    int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, kv_head, batch] = place_of_keys<Bc>(blockIdx.x, sizes, mods, kv_heads);
  const int first_key = tile * Bc;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  if (!extent.has_tile_of_keys(first_key)) return;
  const Scorer<float> scorer = {scale, mods};
  Walk walk = {WalkDown<Br, Bc>(extent, first_key, kv_head, group), Q_high,  Q_low, dO_high, dO_low,
               {lse, delta, scale2, dO_units, flags, batch},        extent.M};
  Sums sums_K = {}, sums_V = {};
  Largest<1> largest[2];
  if (walk.left > 0) {
    Loads first;
    walk.load_stats(first);
    PartsHead<depth>(K_high, K_low, batch, kv_head, extent.N).copy<threads>(shared.K, first_key);
    PartsHead<width>(V_high, V_low, batch, kv_head, extent.N).copy<threads>(shared.V, first_key);
    walk.begin_Q(shared);
    cp_async_commit_group();
    first.store(shared.stats[0]);
    meet();
    walk.begin_dO(shared);
    cp_async_commit_group();
  }
  for (int turn = 0; walk.left > 0; turn = 1 - turn) {
    const TilePair<Br, Bc> pair = {extent.of_head(walk.head), walk.first_row, first_key};
    if (pair.is_whole() && pair.reaches_all())
      step_down<false>(shared, walk, pair, sums_K, sums_V, largest, turn, scorer);
    else
      step_down<true>(shared, walk, pair, sums_K, sums_V, largest, turn, scorer);
  }
  const PartKeys<d, dv, row_slabs> keys(row_maxima, extent, batch, kv_head, kv_heads, group);
  store_keys<false>(shared, sums_K, largest[0], keys, dK, dK_flags, K_exponents, scale, first_key);
  store_keys<true>(shared, sums_V, largest[1], keys, dV, dV_flags, V_exponents, scale, first_key);
}
