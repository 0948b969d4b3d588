// mma_f64_tangent: `mma_tangent` for float64, with the fragments and copies of `mma_f64`.
//
// Above 64 columns of V, O and O_dot of 16 rows exceed the registers of a warp. Two warps then own
// these rows as a team, each with half of the columns of O. For S and S_dot each multiplies half of
// the columns of Q and K. They exchange sums in shared memory, so that both hold all of S, and
// compute the same P. The barrier between scores and outputs, which V waits at, orders the
// exchange.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   Q_dot, K_dot, V_dot, O_dot, lse_dot: like these, with directions * batch in place of batch
//   grid (cdiv(M, Br) * heads * batch * directions)    block (2 * team * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, d, dv, directions, moves_q, moves_k,
//   moves_v, threads, shared_bytes and options (extent.cuh)
#include <attention/exp2_f64.cuh>
#include <attention/row_tile.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/f64_tiles.cuh>
#include <ptx/cp_async.cuh>
#include <tangent/parts/tangent_epilogue.cuh>
#include <tile/f64_fragments.cuh>
#include <tile/shared.cuh>

constexpr int team = cdiv(dv, 64);                      // warps that own 16 rows: 1 or 2
constexpr int depth = cdiv(d, step) * step;             // columns of Q and K, padded with zeros
constexpr int own_width = cdiv(dv, team* step) * step;  // columns of V and O of a warp
constexpr int width = team * own_width;

// Q in operand order: pairs of rows r and r + 8 of a column.
using Queries = double2[Br / step][depth / step][4][warp_size];

// A warp's place: its team, its number in the team, and the lane.
struct Warp {
  int group, rank, lane;
};

// Sums over columns of Q and K that the warps of a team exchange: pairs of neighbouring keys.
template <int team>
struct Exchange {
  double2 sums[Br / step][team][Bc / 8][2][warp_size];

  __device__ __forceinline__ void give(const Fragments<step, Bc>& D, const Warp& own) {
#pragma unroll
    for (int i = 0; i < Bc / 4; ++i)
      sums[own.group][own.rank][i / 2][i % 2][own.lane] = {D[0][i / 2][i % 2 * 2],
                                                           D[0][i / 2][i % 2 * 2 + 1]};
  }
  // Adds the sums of the other warp. Both warps get the same bits, because a + b is b + a.
  __device__ __forceinline__ void take(Fragments<step, Bc>& D, const Warp& own) const {
#pragma unroll
    for (int i = 0; i < Bc / 4; ++i) {
      const double2 pair = sums[own.group][1 - own.rank][i / 2][i % 2][own.lane];
      D[0][i / 2][i % 2 * 2] += pair.x, D[0][i / 2][i % 2 * 2 + 1] += pair.y;
    }
  }
};
template <>
struct Exchange<1> {
  __device__ __forceinline__ void give(const Fragments<step, Bc>&, const Warp&) {}
  __device__ __forceinline__ void take(Fragments<step, Bc>&, const Warp&) const {}
};
struct Scores : Exchange<team> {};
struct Slopes : Exchange<team> {};

struct Shared : Scores, Slopes {
  Queries Q, Q_dot;
  operand K[Bc][depth], K_dot[Bc][depth];
  operand V[Bc][width], V_dot[Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(operand) == 8, "these tensor-core products take float64");
static_assert(team <= 2, "two warps hold at most 128 columns of O and O_dot");
static_assert(threads == warp_size * team * Br / step, "each team owns 16 rows");
static_assert(Br % step == 0 && Bc % step == 0, "tiles are multiples of the MMA shape");

__device__ __forceinline__ void load_operand(double (&a)[8], Queries& Q, const Warp& own, int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const double2 pair = Q[own.group][k][i][own.lane];
    a[2 * i] = pair.x, a[2 * i + 1] = pair.y;
  }
}

// S = Q K^T and S_dot = Q_dot K^T + Q K_dot^T for the team's rows, over this warp's share of the
// columns. Fragments of K are loaded twice, since no registers are left to keep them.
__device__ __forceinline__ void multiply_scores(Shared& shared, Fragments<step, Bc>& S,
                                                Fragments<step, Bc>& S_dot, const Warp& own) {
  const timeline::Phase phase(timeline::products);
  const AlongRows<depth> keys(shared.K, 0, own.lane), keys_dot(shared.K_dot, 0, own.lane);
#pragma unroll 1
  for (int k = own.rank; k < depth / step; k += team) {
    const auto multiply = [&](Fragments<step, Bc>& D, const double (&a)[8], const auto& of) {
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) {
        double b[4];
        of.load(b, n * 8, k);
        multiply_add_f64(D[0][n], a, b);
      }
    };
    double a[8];
    load_operand(a, shared.Q, own, k);
    multiply(S, a, keys);
    if constexpr (moves_k) multiply(S_dot, a, keys_dot);
    if constexpr (moves_q) {
      load_operand(a, shared.Q_dot, own, k);
      multiply(S_dot, a, keys);
    }
  }
}

// Arranges two neighbouring fragments, 16 keys, as an operand of the next product.
__device__ __forceinline__ void arrange_keys(const Fragments<step, Bc>& P, int k, double (&a)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = P[0][2 * k + i / 4][i % 2 * 2 + i / 2 % 2];
}

// Computes P and P_dot, O += P V and O_dot += P_dot V + P V_dot for this warp's columns. The
// exponentials of 16 keys stand right before their products, as in `mma_f64`.
__device__ __forceinline__ void multiply_output(Shared& shared, Fragments<step, Bc>& S,
                                                Fragments<step, Bc>& S_dot,
                                                Fragments<step, own_width>& O,
                                                Fragments<step, own_width>& O_dot,
                                                TangentRows& rows, real scale, int first_key,
                                                const Warp& own) {
  const timeline::Phase phase(timeline::products);
  const DownColumns<width> values(shared.V, own.rank * own_width, own.lane),
      values_dot(shared.V_dot, own.rank * own_width, own.lane);
  real sum[1][2] = {};
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    exponentiate(S, 2 * k, rows, sum);
    exponentiate(S, 2 * k + 1, rows, sum);
    weigh(S, S_dot, 2 * k, 2 * k + 2, scale, rows);
    for_dropped(S, k, k + 1, rows, first_key,
                [&](int i, int j, int e) { S[i][j][e] = S_dot[i][j][e] = 0; });
    double p[8], p_dot[8];
    arrange_keys(S, k, p);
    arrange_keys(S_dot, k, p_dot);
#pragma unroll
    for (int n = 0; n < own_width / 8; ++n) {
      double b[4];
      values.load(b, k, n);
      multiply_add_f64(O[0][n], p, b);
      if (moves_scores) multiply_add_f64(O_dot[0][n], p_dot, b);
      if (!moves_v) continue;
      values_dot.load(b, k, n);
      multiply_add_f64(O_dot[0][n], p, b);
    }
  }
  rows.add(sum);
}

// Stores the warp's 16 rows of O, as store_output() of epilogue.cuh does for float.
template <int cols, int blocks>
__device__ __forceinline__ void store_output(const double (&O)[1][blocks][4],
                                             const Rows<step>& rows, Tensor<result> out, int batch,
                                             int head, int lane, int first_col) {
  store_rows<cols>(O, rows, out, batch, head, lane, first_col);
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_f64_tangent(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> Q_dot, Tensor<const operand> K_dot, Tensor<const operand> V_dot,
    Tensor<result> O, Tensor<real> lse, Tensor<result> O_dot, Tensor<real> lse_dot, Sizes sizes,
    int heads, int batches, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const int blocks = gridDim.x / directions;
  const int direction = directions == 1 ? 0 : blockIdx.x / blocks;
  const auto [index, head, batch] =
      place_of_rows<Br>(blockIdx.x - direction * blocks, sizes, mods, heads);
  const int warp = threadIdx.x / warp_size;
  const Warp own = {warp / team, warp % team, int(threadIdx.x % warp_size)};
  const int kv_head = head / group, its = direction * batches + batch;  // element of tangents
  const Extent extent = extent_of(sizes, mods, batch, head);
  const Scorer<real> scorer = {scale, mods};
  // Reversed order: under a causal mask the last rows have the most keys and should start first.
  const int row = (cdiv(extent.M, Br) - 1 - index) * Br;
  if (!extent.has_tile_of_rows(row)) return;
  const RowTile tile = row_tile<Br, Bc>(extent, row, head, batch);
  const auto load_keys = [&, batch = batch](int first_key) {
    copy_rows<threads, d>(shared.K, Head(K, batch, kv_head, extent.N), first_key);
    if (moves_k)
      copy_rows<threads, d>(shared.K_dot, Head(K_dot, its, kv_head, extent.N), first_key);
    cp_async_commit_group();
  };
  const auto load_values = [&, batch = batch](int first_key) {
    const auto copy = [&](operand(&to)[Bc][width], const Head& values) {
      copy_tile<threads, width, width == dv>(to, values, first_key, 0, dv);
    };
    copy(shared.V, Head(V, batch, kv_head, extent.N));
    if (moves_v) copy(shared.V_dot, Head(V_dot, its, kv_head, extent.N));
    cp_async_commit_group();
  };

  if (tile.kv_begin < tile.kv_end) load_keys(tile.kv_begin);
  load_queries<threads, 1, d>(shared.Q, Head(Q, batch, head, extent.M), row);
  if (moves_q) load_queries<threads, 1, d>(shared.Q_dot, Head(Q_dot, its, head, extent.M), row);
  Fragments<step, own_width> sums = {}, sums_dot = {};
  TangentRows rows(row + own.group * step + own.lane / 4, extent, scorer.scale2());
  for (int first_key = tile.kv_begin; first_key < tile.kv_end;
       first_key = tile.after<Bc>(first_key)) {
    timeline::event(timeline::tile, first_key, row);
    cp_async_wait_group<0>();
    __syncthreads();  // K has arrived, and V of the previous tile is no longer read
    load_values(first_key);
    Fragments<step, Bc> S = {}, S_dot = {};
    multiply_scores(shared, S, S_dot, own);
    shared.Scores::give(S, own);
    if (moves_scores) shared.Slopes::give(S_dot, own);
    cp_async_wait_group<0>();
    __syncthreads();  // V and the sums of others have arrived, and K is no longer read
    if (const int next = tile.after<Bc>(first_key); next < tile.kv_end) load_keys(next);
    shared.Scores::take(S, own);
    if (moves_scores) shared.Slopes::take(S_dot, own);
    apply_with_slopes(scorer, S, S_dot, rows, first_key, tile.is_full<Bc>(first_key));
    rescale<true>(S, sums, sums_dot, rows, first_key, own.lane);  // also masks S
    multiply_output(shared, S, S_dot, sums, sums_dot, rows, scale, first_key, own);
  }
  const int first_col = own.rank * own_width;
  const int same = team > 1 ? opaque(head) : head;  // dividing again saves a register in the loop
  const Tangents all = {Q, K, V, Q_dot, K_dot, V_dot, O, lse, O_dot, lse_dot, first_col};
  finish<d, dv>(all, sums, sums_dot, rows, batch, its, head, same / group, scorer);
}
