// mma_tangent: `fa2_tangent` with the tensor cores (mma.sync), for 16-bit numbers.
//
// The products are those of `mma_async`, and the derivative of each product D = A B is computed
// beside it, D_dot = A_dot B + A B_dot: for scores A = Q and B = K^T, for outputs A = P and B = V,
// with P_dot = P S_dot. All three products of a step take the same operands, so a fragment of K or
// V that was loaded once serves D and D_dot. Sums of P S_dot stay beside those of P, and O_dot in
// registers beside O; a higher maximum rescales all of them.
//
// A tangent that is 0 is neither loaded nor multiplied. Each direction has blocks of its own.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   Q_dot, K_dot, V_dot, O_dot, lse_dot: like these, with directions * batch in place of batch
//   grid (cdiv(M, Br) * heads * batch * directions)    block (2 * Br): each warp owns 16 rows
//   the host sets: scalar, result, operand, real, Br, Bc, stages, d, dv, directions, moves_q,
//   moves_k, moves_v, threads, shared_bytes and options (extent.cuh)
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>
#include <tangent/parts/tangent_epilogue.cuh>
#include <tile/async_copy.cuh>
#include <tile/shared.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, step) * step;  // columns of V and O

struct Shared {
  operand Q[Br][depth], Q_dot[Br][depth];
  operand K[stages][Bc][depth], K_dot[stages][Bc][depth];
  operand V[stages][Bc][width], V_dot[stages][Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br / step, "each warp owns 16 rows");
static_assert(Bc % step == 0, "tiles are multiples of the MMA shape");

// D += A B and D_dot += A_dot B + A B_dot for 16 columns of A, if A and B move. load(b, j) and
// load_dot(b, j) load the fragments of B and B_dot for columns 16 j to 16 j + 15.
template <bool moves_A, bool moves_B, int n, class Load, class LoadDot>
__device__ __forceinline__ void multiply_step(float (&D)[1][n][4], float (&D_dot)[1][n][4],
                                              const unsigned (&a)[4], const unsigned (&a_dot)[4],
                                              Load load, LoadDot load_dot) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) {
    unsigned b[4], b_dot[4];
    load(b, j);
    if constexpr (moves_B) load_dot(b_dot, j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      multiply_add<operand>(D[0][2 * j + i], a, b[i * 2], b[i * 2 + 1]);
      if constexpr (moves_A)
        multiply_add<operand>(D_dot[0][2 * j + i], a_dot, b[i * 2], b[i * 2 + 1]);
      if constexpr (moves_B)
        multiply_add<operand>(D_dot[0][2 * j + i], a, b_dot[i * 2], b_dot[i * 2 + 1]);
    }
  }
}

// S = Q K^T and S_dot = Q_dot K^T + Q K_dot^T for the warp's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(Shared& shared, int stage, Fragments<step, Bc>& S,
                                                Fragments<step, Bc>& S_dot, int own_row, int lane) {
  const timeline::Phase phase(timeline::products);
  const auto load_keys = [&](operand(&K)[Bc][depth], unsigned (&b)[4], int j, int k) {
    ldmatrix(b, at(K, j * step + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
  };
#pragma unroll
  for (int k = 0; k < depth / step; ++k) {
    unsigned q[4], q_dot[4];
    ldmatrix(q, at(shared.Q, own_row + lane % 16, 2 * k + lane / 16));
    if (moves_q) ldmatrix(q_dot, at(shared.Q_dot, own_row + lane % 16, 2 * k + lane / 16));
    multiply_step<moves_q, moves_k>(
        S, S_dot, q, q_dot, [&](unsigned (&b)[4], int j) { load_keys(shared.K[stage], b, j, k); },
        [&](unsigned (&b)[4], int j) { load_keys(shared.K_dot[stage], b, j, k); });
  }
}

// Rounds two neighbouring fragments, 16 keys, to an operand of the next product.
__device__ __forceinline__ void pack_keys(const Fragments<step, Bc>& P, int k, unsigned (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = pack<operand>(P[0][2 * k + i / 2][i % 2 * 2], P[0][2 * k + i / 2][i % 2 * 2 + 1]);
}

// Computes P and P_dot, O += P V and O_dot += P_dot V + P V_dot. The exponentials of 16 keys stand
// right before their products, as in `mma_pipelined`.
__device__ __forceinline__ void multiply_output(Shared& shared, int stage, Fragments<step, Bc>& S,
                                                Fragments<step, Bc>& S_dot,
                                                Fragments<step, width>& O,
                                                Fragments<step, width>& O_dot, TangentRows& rows,
                                                real scale, int first_key, int lane) {
  const timeline::Phase phase(timeline::products);
  const auto load_values = [&](operand(&V)[Bc][width], unsigned (&b)[4], int j, int k) {
    ldmatrix_trans(b, at(V, k * step + lane % 16, 2 * j + lane / 16));
  };
  real sum[1][2] = {};
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    exponentiate(S, 2 * k, rows, sum);
    exponentiate(S, 2 * k + 1, rows, sum);
    weigh(S, S_dot, 2 * k, 2 * k + 2, scale, rows);
    for_dropped(S, k, k + 1, rows, first_key,
                [&](int i, int j, int e) { S[i][j][e] = S_dot[i][j][e] = 0; });
    unsigned p[4], p_dot[4];
    pack_keys(S, k, p);
    pack_keys(S_dot, k, p_dot);
    multiply_step<moves_scores, moves_v>(
        O, O_dot, p, p_dot, [&](unsigned (&b)[4], int j) { load_values(shared.V[stage], b, j, k); },
        [&](unsigned (&b)[4], int j) { load_values(shared.V_dot[stage], b, j, k); });
  }
  rows.add(sum);
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_tangent(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> Q_dot, Tensor<const operand> K_dot, Tensor<const operand> V_dot,
    Tensor<result> O, Tensor<real> lse, Tensor<result> O_dot, Tensor<real> lse_dot, Sizes sizes,
    int heads, int batches, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const int blocks = gridDim.x / directions, direction = blockIdx.x / blocks;
  const auto [index, head, batch] =
      place_of_rows<Br>(blockIdx.x - direction * blocks, sizes, mods, heads);
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * step;
  const int kv_head = head / group, its = direction * batches + batch;  // element of tangents
  const Extent extent = extent_of(sizes, mods, batch, head);
  const Scorer<real> scorer = {scale, mods};
  // Reversed order: under a causal mask the last rows have the most keys and should start first.
  const int row = (cdiv(extent.M, Br) - 1 - index) * Br;
  if (!extent.has_tile_of_rows(row)) return;
  const RowTile tile = row_tile<Br, Bc>(extent, row, head, batch);
  const auto load_keys = [&, batch = batch](int first_key, int stage) {
    copy_rows<threads, d>(shared.K[stage], Head(K, batch, kv_head, extent.N), first_key);
    if (moves_k)
      copy_rows<threads, d>(shared.K_dot[stage], Head(K_dot, its, kv_head, extent.N), first_key);
    copy_rows<threads, dv>(shared.V[stage], Head(V, batch, kv_head, extent.N), first_key);
    if (moves_v)
      copy_rows<threads, dv>(shared.V_dot[stage], Head(V_dot, its, kv_head, extent.N), first_key);
  };

  copy_rows<threads, d>(shared.Q, Head(Q, batch, head, extent.M), row);
  if (moves_q) copy_rows<threads, d>(shared.Q_dot, Head(Q_dot, its, head, extent.M), row);
  if (stages == 2) load_keys(tile.kv_begin, 0);
  cp_async_commit_group();
  Fragments<step, width> sums = {}, sums_dot = {};
  TangentRows rows(row + own_row + lane / 4, extent, scorer.scale2());
  int stage = 0;
  for (int first_key = tile.kv_begin, next; first_key < tile.kv_end; first_key = next) {
    timeline::event(timeline::tile, first_key, row);
    next = tile.after<Bc>(first_key);
    if (stages == 1) {
      __syncthreads();  // no warp still reads the previous tile
      load_keys(first_key, 0);
      cp_async_commit_group();
    }
    cp_async_wait_group<0>();
    __syncthreads();  // this tile has arrived, and no warp still reads the previous one
    if (stages == 2 && next < tile.kv_end) load_keys(next, 1 - stage);
    cp_async_commit_group();
    Fragments<step, Bc> S = {}, S_dot = {};
    multiply_scores(shared, stage, S, S_dot, own_row, lane);
    apply_with_slopes(scorer, S, S_dot, rows, first_key, tile.is_full<Bc>(first_key));
    if (is_masked(extent, row, Br, first_key, Bc))
      rescale<true>(S, sums, sums_dot, rows, first_key, lane);  // also masks S
    else
      rescale<false>(S, sums, sums_dot, rows, first_key, lane);
    multiply_output(shared, stage, S, S_dot, sums, sums_dot, rows, scale, first_key, lane);
    stage = stages - 1 - stage;
  }
  const Tangents all = {Q, K, V, Q_dot, K_dot, V_dot, O, lse, O_dot, lse_dot};
  finish<d, dv>(all, sums, sums_dot, rows, batch, its, head, kv_head, scorer);
}
