#pragma once
// What warpgroups that own 64 rows each do with tiles in boxes. Their fragments are those of
// row_state.cuh, with 16 rows for each warp.

#include <tile/tma_tile.cuh>
#include <attention/row_state.cuh>
#include <ptx/named_barrier.cuh>
#include <tile/store.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/wgmma.cuh>

constexpr int warpgroup_rows = 64;
constexpr int width = cdiv(dv, step) * step;    // of O
constexpr int consumers = Br / warpgroup_rows;  // warpgroups; one more is the producer's
static_assert(Br % warpgroup_rows == 0 && Wr == step && pack_gqa == 1, "a warpgroup owns 64 rows");
static_assert(Bc % step == 0, "tiles are made of whole products");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");

using Queries = TmaTile<operand, Br, d>;
using Keys = TmaTile<operand, Bc, d>;
using Values = TmaTile<operand, Bc, dv>;
using Weights = unsigned[Bc / step][4];  // P, as operands of O += P V

// Registers are the consumers', but for a few.
__device__ __forceinline__ void give_to_consumers() {
  decrease_registers<consumers == 3 ? 32 : 40>();
}
__device__ __forceinline__ void take_from_producer() {
  increase_registers<consumers == 3 ? 160 : 232>();
}

// Takes the sign of the scale, or its being 0, into the warpgroup's rows of Q, from a row of the
// tile on.
template <int rows>
__device__ void apply_sign(TmaTile<operand, rows, d>& Q, int row, float scale, int warpgroup) {
  constexpr int chunks = TmaTile<operand, rows, d>::count * box_columns / 8;
  for (int i = threadIdx.x % warpgroup_size; i < warpgroup_rows * chunks; i += warpgroup_size) {
    operand* q = Q.at(row + i / chunks, i % chunks);
    for (int j = 0; j < 8; ++j) q[j] = operand(float(q[j]) * (scale < 0 ? -1.0f : 0.0f));
  }
  fence_proxy_async();
  barrier_sync(1 + warpgroup, warpgroup_size);
}

// Begins S = Q K^T for 64 rows, from a row of the tile on, and a tile's keys.
template <int rows>
__device__ __forceinline__ void begin_scores(const TmaTile<operand, rows, d>& Q, const Keys& K,
                                             Fragments<step, Bc>& S, int row) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < cdiv(d, step); ++k) {
    const Matrix queries = by_rows(Q.box[k / 4][row]);
    multiply<operand>(flat(S), queries + k % 4 * 32, by_rows(K.box[k / 4]) + k % 4 * 32, k > 0);
  }
  wgmma_commit_group();
}

// Begins O += P V, or O = P V unless it is to be `added`.
template <int blocks>
__device__ __forceinline__ void begin_output(const Values& V, const Weights& P,
                                             float (&O)[1][blocks][4], bool added) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Bc / step; ++k)
    multiply<operand>(flat(O), P[k], by_columns(V.box, Bc) + k * 2048, added || k > 0);
  wgmma_commit_group();
}

__device__ __forceinline__ void pack_weights(const Fragments<step, Bc>& S, Weights& P) {
#pragma unroll
  for (int i = 0; i < Bc / 4; ++i) {
    const float (&p)[4] = S[0][i / 2];
    P[i / 4][i % 4] = pack<operand>(p[i % 2 * 2], p[i % 2 * 2 + 1]);
  }
}

// Writes the warp's rows of O from a column on, 16 bytes at a time where rows lie so.
template <int blocks>
__device__ __forceinline__ void store_pieces(const float (&O)[1][blocks][4], const Rows<step>& rows,
                                             Tensor<scalar> out, int batch, int head, int M,
                                             int lane, int first_col = 0) {
  const bool aligned = is_aligned(out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned pairs[blocks];
#pragma unroll
    for (int n = 0; n < blocks; ++n)
      pairs[n] = pack<scalar>(O[0][n][half * 2], O[0][n][half * 2 + 1]);
    const int row = rows.row(0, half);
    store_row<dv>(out.row(batch, head, row), pairs, first_col, aligned, row < M, lane);
  }
}
