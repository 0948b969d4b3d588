// mma_fp16x2_two_pass_columns: `mma_two_pass_columns` with float32 accuracy. Each operand is split
// into two float16 numbers (split_pair.cuh).
//
// A warp owns 16 keys. Scores are computed transposed, S^T = K Q^T, so that P^T and dS^T stay in
// registers as operands of dV += P^T dO and dK += dS^T Q. They are multiplied by the powers of two
// that scale rows of dO and Q, and then by another power of two for each key and tile.
//
// If several warps share 16 keys, each processes some rows of every tile, and their accumulators
// are added up at the end. If dK and dV of 16 keys do not fit into registers,
// `mma_fp16x2_two_pass_columns_wide` computes them.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   Q_high …, scale2, flags: see split_operands.cu    dO_high …, dO_units: see split_gradient.cu
//   column_bits: see column_bits.cuh    lse, delta [batch, heads, M]
//   dK_flags, dV_flags [batch, kv_heads, N]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (32 * warps)
//   the host sets: scalar, result, operand, real, Br, Bc, warps, stages, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/tile_index.cuh>
#include <backward/parts/split_f32/split_gradients.cuh>
#include <backward/parts/split_f32/split_row_iterator.cuh>
#include <backward/parts/split_f32/store_split_dK_dV.cuh>
#include <forward/parts/split_f32/weighted_products.cuh>
#include <ptx/arch.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/opaque.cuh>
#include <tile/shared.cuh>
#include <tile/warp.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of the Q and K tiles, zero-padded
constexpr int width = cdiv(dv, step) * step;  // columns of the dO and V tiles
constexpr int sharing = warps * step / Bc;    // warps that share 16 keys
constexpr int own_rows = Br / sharing;        // rows of a tile per warp
// Whether fragments of S and dP are prefetched, which is 3 % faster. On sm_80, above d + dv = 128,
// prefetching takes too many registers, and ptxas spills in the loop.
constexpr bool looks_ahead =
    depth % 64 == 0 && width % 64 == 0 && (on_hopper || depth + width <= 128);
constexpr int at_once = looks_ahead ? 4 : depth > 64 ? 1 : 2;  // unroll factor of the products

struct Shared {  // index 0: high halves, index 1: low halves
  operand K[2][Bc][depth];
  operand V[2][Bc][width];
  operand Q[stages][2][Br][depth];
  operand dO[stages][2][Br][width];
  SplitStats stats[2][Br];
  float largest[2][sharing][Bc];  // largest weights for dK and dV
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc % step == 0 && warps * step % Bc == 0, "a warp owns 16 keys");
static_assert(Br % (sharing * step) == 0, "warps share out whole products");

using Loads = SplitStatsLoads<threads, Br>;
using Walk = SplitRowIterator<threads, Br, Bc, depth, width>;
using Weights = float[1][own_rows / 8][4];
template <int columns>
using Sums = float[1][columns / 8][4];

// A warp's first key, and its first row in each row tile.
struct Own {
  int key, row, lane;

  __device__ __forceinline__ Own() {
    const int warp = threadIdx.x / warp_size;
    key = warp / sharing * step;
    row = warp % sharing * own_rows;
    lane = threadIdx.x % warp_size;
  }
  __device__ __forceinline__ OwnScores<true> scores() const {
    return {row + 2 * (lane % 4), key + lane / 4};
  }
};

// Computes S^T or dP^T.
template <int columns>
__device__ __forceinline__ void multiply_keys(operand (&keys)[2][Bc][columns],
                                              operand (&rows)[2][Br][columns], Weights& products,
                                              const Own& own) {
  multiply_scores<at_once>(keys, rows, products, own.key, own.lane, own.row);
}

// Adds weights * B to `sums`, with weights P^T or dS^T of a tile and the warp's rows of B.
template <int columns>
__device__ __forceinline__ void add_product(Sums<columns>& sums, Weights& weights,
                                            Largest<1>& largest, operand (&B)[2][Br][columns]) {
  const Own own;
  float factor[1][2];
  largest.raise(weights, factor);
  multiply_output<true>(B, weights, sums, factor, own.lane, own.row);
}

// Processes one row tile: computes P^T and dS^T, then dK += dS^T Q and dV += P^T dO. With two
// stages, Q and dO have arrived on entry, and the next Q and dO on return. With one stage only Q
// has arrived, and each of Q and dO is replaced while the other one is read. If `masked` is false,
// every row must see every key.
template <bool masked>
__device__ __forceinline__ void step_down(Shared& shared, Walk& walk, const TilePair<Br, Bc>& pair,
                                          Sums<depth>& dK, Sums<width>& dV,
                                          Largest<1> (&largest)[2], int turn,
                                          const Scorer<float>& scorer) {
  const int stage = stages == 2 ? turn : 0;
  walk.advance();
  const bool more = walk.left > 0;
  Loads next;
  if (stages == 2) {
    if (more) walk.begin_Q(shared.Q[1 - stage]), walk.begin_dO(shared.dO[1 - stage]);
    cp_async_commit_group();
  }
  const SplitStats(&stats)[Br] = shared.stats[turn];
  Weights P = {}, PS, dS = {};
  {
    const Own own;
    multiply_keys(shared.K, shared.Q[stage], P, own);
    compute_P<masked>(P, PS, stats, own.scores(), pair, scorer);
  }
  if (stages == 1) meet();  // dO has arrived
  {
    const Own own;
    multiply_keys(shared.V, shared.dO[stage], dS, own);
    compute_dS(dS, PS, stats, own.scores(), pair.extent.kept_factor());
    multiply_units<&SplitStats::unit>(dS, stats, own.scores());
  }
  add_product(dK, dS, largest[0], shared.Q[stage]);
  if (stages == 1) {
    __syncthreads();  // Q is no longer read
    if (more) walk.begin_Q(shared.Q[0]);
    cp_async_commit_group();
  }
  if (more) walk.load_stats(next);
  multiply_units<&SplitStats::dO_unit>(P, stats, Own().scores());
  add_product(dV, P, largest[1], shared.dO[stage]);
  if (more) next.store(shared.stats[1 - turn]);
  meet();  // the next tile has arrived (with one stage, only its Q)
  if (stages == 1) {
    if (more) walk.begin_dO(shared.dO[0]);
    cp_async_commit_group();
  }
}

// Combines accumulators and maxima of warps that share keys in the first warp, in a fixed order.
// The other warps pass their accumulators through the tile of K or V, which is no longer read.
template <int columns>
__device__ __forceinline__ void join_sums(operand (&tile)[2][Bc][columns],
                                          float (&maxima)[sharing][Bc], Sums<columns>& sums,
                                          Largest<1>& largest) {
  if constexpr (sharing == 1) return;
  const Own own;
  constexpr int count = columns / 2;
  const int turn = own.row / own_rows, group = own.key / step;
  float* place = reinterpret_cast<float*>(tile[0][0]) + group * count * warp_size + own.lane;
#pragma unroll 1
  for (int other = 1; other < sharing; ++other) {
    __syncthreads();  // the buffer is free
    if (turn == other) {
#pragma unroll
      for (int i = 0; i < count; ++i) place[i * warp_size] = sums[0][i / 4][i % 4];
      if (own.lane % 4 < 2)
        maxima[other][own.key + own.lane / 4 + own.lane % 4 * 8] =
            largest.weight[0][own.lane % 4 == 1];
    }
    __syncthreads();  // the other warp's sums are written
    if (turn > 0) continue;
#pragma unroll
    for (int i = 0; i < count; ++i) sums[0][i / 4][i % 4] += place[i * warp_size];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      largest.weight[0][half] =
          fmax(largest.weight[0][half], maxima[other][own.key + own.lane / 4 + half * 8]);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_fp16x2_two_pass_columns(
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
  Sums<depth> sums_K = {};
  Sums<width> sums_V = {};
  Largest<1> largest[2];
  if (walk.left > 0) {
    Loads first;
    walk.load_stats(first);
    SplitHead<depth>(K_high, K_low, batch, kv_head, extent.N).copy<threads>(shared.K, first_key);
    SplitHead<width>(V_high, V_low, batch, kv_head, extent.N).copy<threads>(shared.V, first_key);
    walk.begin_Q(shared.Q[0]);
    if (stages == 2) walk.begin_dO(shared.dO[0]);
    cp_async_commit_group();
    first.store(shared.stats[0]);
    meet();
    if (stages == 1) walk.begin_dO(shared.dO[0]);
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
  const Own own;
  const int own_key = first_key + own.key;
  join_sums(shared.K, shared.largest[0], sums_K, largest[0]);
  join_sums(shared.V, shared.largest[1], sums_V, largest[1]);
  if (own.row != 0) return;
  keys.store<false>(sums_K, largest[0], dK, dK_flags, K_exponents, scale, own_key, own.lane);
  keys.store<true>(sums_V, largest[1], dV, dV_flags, V_exponents, scale, own_key, own.lane);
}
