// mma_fp16x2_two_pass_rows_wide: `mma_fp16x2_two_pass_rows` with twice as many warps, which wide
// heads leave room for one block of. Teams of four warps own 32 rows (given_weights.cuh): each warp
// computes some of P and dS, and adds some columns of dQ += dS K.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   Q_high …, scale2, flags: see split_operands.cu    dO_high …, dO_units: see split_gradient.cu
//   lse, delta [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (4 * Br)
//   the host sets: scalar, operand, real, Br, Bc, d, dv, threads, shared_bytes and
//   options (score.cuh)
#include <backward/parts/given_weights.cuh>
#include <forward/parts/parts_head.cuh>
#include <tile/shared.cuh>

constexpr int depth = cdiv(d, step) * step;   // of Q and K, filled up with zeros
constexpr int width = cdiv(dv, step) * step;  // of dO and V
constexpr int ahead_of_K = depth % 64 == 0 ? 4 : 1, ahead_of_V = width % 64 == 0 ? 4 : 1;
using Given = GivenWeights<Br, Bc>;

struct Shared {  // high parts, then low ones
  operand Q[2][Br][depth];
  operand dO[2][Br][width];
  operand K[2][Bc][depth];
  operand V[2][Bc][width];
  PartStats stats[Br];
  Given given;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == Br / team_rows * team * warp_size, "four warps own 32 rows");

// The keys and values of a head. The addresses of heads are computed here again: registers do not
// keep them.
struct Keys {
  Tensor<const operand> K_high, K_low, V_high, V_low;
  int batch, head, N;

  __device__ __forceinline__ void begin_K(Shared& shared, int first_key) const {
    PartsHead<depth>(K_high, K_low, opaque(batch), opaque(head), N)
        .copy<threads>(shared.K, first_key);
  }
  __device__ __forceinline__ void begin_V(Shared& shared, int first_key) const {
    PartsHead<width>(V_high, V_low, opaque(batch), opaque(head), N)
        .copy<threads>(shared.V, first_key);
  }
};

// One tile of keys: P, dS and dQ += dS K. V is there when it begins. Each of K and V is replaced
// while the other one is read. Unless it is `masked` every row sees every key.
template <bool masked>
__device__ __forceinline__ void step_along(Shared& shared, const Keys& keys,
                                           const TilePair<Br, Bc>& pair, const RowTile& rows,
                                           TeamSums<depth>& dQ, Largest<1>& largest,
                                           const Scorer<float>& scorer) {
  const int next = rows.after<Bc>(pair.first_key);
  const bool more = next < rows.kv_end;
  Weights P = {}, PS, dS = {};
  if (Given::has_own()) {
    const TeamPlace own;
    multiply_scores<ahead_of_V, true>(shared.dO, shared.V, dS, own.row, own.lane, own.number);
  }
  meet();  // K is there, and V is no longer read
  if (more) keys.begin_V(shared, next);
  cp_async_commit_group();
  if (Given::has_own()) {
    const TeamPlace own;
    const OwnScores<false> scores = {own.row + own.lane / 4, own.number + 2 * (own.lane % 4)};
    multiply_scores<ahead_of_K, true>(shared.Q, shared.K, P, own.row, own.lane, own.number);
    compute_P<masked>(P, PS, shared.stats, scores, pair, scorer);
    compute_dS(dS, PS, shared.stats, scores, pair.extent.kept_factor());
    shared.given.give(dS, largest);
  }
  Given::meet_team();
  shared.given.multiply(dQ, shared.K);
  meet();  // the next V is there, and these are no longer read
  if (more) keys.begin_K(shared, next);
  cp_async_commit_group();
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_fp16x2_two_pass_rows_wide(
    Tensor<const operand> Q_high, Tensor<const operand> Q_low, Tensor<const operand> K_high,
    Tensor<const operand> K_low, Tensor<const operand> V_high, Tensor<const operand> V_low,
    Tensor<const operand> dO_high, Tensor<const operand> dO_low, const int* K_exponents,
    Tensor<const real> lse, Tensor<const real> delta, Tensor<const real> scale2,
    Tensor<const real> dO_units, Tensor<unsigned char> flags, Tensor<scalar> dQ, Sizes sizes,
    int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  // The longest rows of a causal mask come first.
  const int first_row = (cdiv(extent.M, Br) - 1 - tile) * Br;
  if (!extent.has_tile_of_rows(first_row)) return;
  const Scorer<float> scorer = {scale, mods};
  const RowTile rows = row_tile<Br, Bc>(extent, first_row, head, batch);
  const int kv_head = head / group;
  const Keys keys = {K_high, K_low, V_high, V_low, batch, kv_head, extent.N};

  PartLoads<threads, Br> loads;
  loads.load({lse,
              delta,
              scale2,
              dO_units,
              {flags.data, flags.batch_stride, flags.head_stride, flags.row_stride},
              batch},
             head, first_row, extent.M);
  PartsHead<depth>(Q_high, Q_low, batch, head, extent.M).copy<threads>(shared.Q, first_row);
  PartsHead<width>(dO_high, dO_low, batch, head, extent.M).copy<threads>(shared.dO, first_row);
  keys.begin_V(shared, rows.kv_begin);
  cp_async_commit_group();
  loads.store(shared.stats);
  meet();
  keys.begin_K(shared, rows.kv_begin);
  cp_async_commit_group();
  TeamSums<depth> sums = {};
  Largest<1> largest;
  for (int first_key = rows.kv_begin; first_key < rows.kv_end;
       first_key = rows.after<Bc>(first_key)) {
    const TilePair<Br, Bc> pair = {extent, first_row, first_key};
    if (pair.is_whole() && pair.reaches_all())
      step_along<false>(shared, keys, pair, rows, sums, largest, scorer);
    else
      step_along<true>(shared, keys, pair, rows, sums, largest, scorer);
  }
  cp_async_wait_group<0>();  // of a tile whose rows see no key
  const int* exponents = K_exponents + ((long long)batch * (heads / group) + kv_head) * d;
  shared.given.store<d, depth>(
      sums, largest, true, scale, dQ, batch, head, first_row, extent.M,
      [&](int col) { return exponents[col] > -127; },
      [&](int col) { return exponents[col] - row_exponent; },
      [&, batch = batch, head = head](int row, bool wrong) {
        if (wrong) *flags.row(batch, head, row) = 1;
      });
}
