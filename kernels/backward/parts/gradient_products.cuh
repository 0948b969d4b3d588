#pragma once
// Products of the backward pass on tensor cores, of 16-bit tiles in shared memory, and P and dS
// between them, in the fragments of mma.cuh.

#include <tile/async_copy.cuh>
#include <attention/row_state.cuh>
#include <ptx/opaque.cuh>
#include <ptx/mma.cuh>
#include <attention/pairs.cuh>
#include <tile/store.cuh>
#include <tile/warp.cuh>

static_assert(sizeof(operand) == 2, "these tensor-core products take 16-bit numbers");

constexpr int depth = cdiv(d, step) * step;   // of Q and K, filled up with zeros
constexpr int width = cdiv(dv, step) * step;  // of V and dO

// The thread's lane, of which nothing was computed ahead.
__device__ __forceinline__ int own_lane() {
  return opaque(int(threadIdx.x)) % warp_size;
}

// Into how many parts warps divide the rows of a product; its columns go to as many warps as share
// a part. The less a part measures around, the less of shared memory is read.
__host__ __device__ constexpr int parts_of_rows(int height, int columns) {
  constexpr int all = threads / warp_size;
  int best = 1, least = 1 << 30;
  for (int parts = 1; parts <= all; parts *= 2) {
    if (all % parts != 0 || height % (parts * step) != 0) continue;
    const int size = height / parts + cdiv(columns, all / parts * step) * step;
    if (size <= least) {
      best = parts;
      least = size;
    }
  }
  return best;
}

// A warp's part of a product: so many rows and columns, from these on.
template <int height, int columns>
struct Part {
  static constexpr int down = parts_of_rows(height, columns);
  static constexpr int across = threads / warp_size / down;
  static constexpr int rows = height / down;
  static constexpr int cols = cdiv(columns, across* step) * step;
  static constexpr bool whole = cols * across == columns;  // else some lie behind its end
  using Sums = float[rows / step][cols / 8][4];
  static constexpr int fours = rows / step * (cols / 8);

  int row, col, end = columns;

  __device__ __forceinline__ Part() {
    const int warp = opaque(int(threadIdx.x)) / warp_size;
    row = warp % down * rows;
    col = warp / down * cols;
  }
  __device__ __forceinline__ bool has(int n) const { return whole || col + n * step < end; }
};

// dQ comes in slices of its columns, for which there are registers beside dK and dV.
constexpr int query_slices = depth > 128 ? 2 : 1;
constexpr int query_cols = cdiv(depth, query_slices* step) * step;

struct QueryPart : Part<Br, query_cols> {
  static constexpr bool whole = Part::whole && query_cols * query_slices == depth;

  __device__ __forceinline__ explicit QueryPart(int slice) {
    col += slice * query_cols;
    end = min(end + slice * query_cols, depth);
  }
  __device__ __forceinline__ bool has(int n) const { return whole || col + n * step < end; }
};

// D += A B for one step of the sum, of A's fragments and B's by columns of 16.
template <int rows, int blocks, class Has, class Load>
__device__ __forceinline__ void multiply_step(float (&D)[rows][blocks][4],
                                              const unsigned (&a)[rows][4], Has has, Load load) {
#pragma unroll
  for (int n = 0; n < blocks / 2; ++n) {
    if (!has(n)) continue;
    unsigned b[4];
    load(b, n);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      multiply_add<operand>(D[i][2 * n], a[i], b[0], b[1]);
      multiply_add<operand>(D[i][2 * n + 1], a[i], b[2], b[3]);
    }
  }
}

// D += A B^T for rows of both, with so many steps of the sum unrolled: with more at once, loads of
// later steps take the registers of what waits.
template <int at_once = 2, class Own, int rows, int blocks, int height, int other, int length>
__device__ __forceinline__ void multiply_transposed(float (&D)[rows][blocks][4],
                                                    operand (&A)[height][length],
                                                    operand (&B)[other][length], const Own& own,
                                                    int lane) {
  const Spots of_A(A, own.row + lane % 16, lane / 16);
  const Spots of_B(B, own.col + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll at_once
  for (int k = 0; k < length / step; ++k) {
    unsigned a[rows][4];
#pragma unroll
    for (int i = 0; i < rows; ++i) ldmatrix(a[i], of_A(i * step, 2 * k));
    multiply_step(
        D, a, [&](int n) { return own.has(n); },
        [&](unsigned (&b)[4], int n) { ldmatrix(b, of_B(n * step, 2 * k)); });
  }
}

// D += A B, or D += A^T B: sums over the rows of B.
template <bool of_columns, class Own, int rows, int blocks, int height, int length, int other,
          int columns>
__device__ __forceinline__ void multiply_tiles(float (&D)[rows][blocks][4],
                                               operand (&A)[height][length],
                                               operand (&B)[other][columns], const Own& own,
                                               int lane) {
#pragma unroll
  for (int k = 0; k < other / step; ++k) {
    unsigned a[rows][4];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      if constexpr (of_columns) {
        const int row = lane / 16 * 8 + lane % 8, chunk = own.row / 8 + 2 * i + lane / 8 % 2;
        ldmatrix_trans(a[i], at(A, row, chunk, k * step));
      } else {
        ldmatrix(a[i], Spots(A, own.row + lane % 16, lane / 16)(i * step, 2 * k));
      }
    }
    multiply_step(
        D, a, [&](int n) { return own.has(n); },
        [&](unsigned (&b)[4], int n) {
          const int chunk = own.col / 8 + 2 * n + lane / 16;
          ldmatrix_trans(b, at(B, lane % 16, chunk, k * step));
        });
  }
}

// The same where B holds infinities or NaN: a hidden pair has weight 0, but 0 * NaN is NaN, so only
// pairs that see each other are taken.
template <bool of_columns, class Own, int rows, int blocks, int height, int length, int other,
          int columns>
__device__ __forceinline__ void multiply_visible(float (&D)[rows][blocks][4],
                                                 operand (&A)[height][length],
                                                 operand (&B)[other][columns], const Own& own,
                                                 const Pairs& pairs, int lane) {
#pragma unroll 1
  for (int k = 0; k < other; ++k) {
#pragma unroll
    for (int i = 0; i < 2 * rows; ++i) {
      const int row = own.row + i * 8 + lane / 4;
      const bool sees = of_columns ? pairs.see(k, row) : pairs.see(row, k);
      if (!sees) continue;
      const float weight = of_columns ? float(at(A, k, row / in_chunk)[row % in_chunk])
                                      : float(at(A, row, k / in_chunk)[k % in_chunk]);
#pragma unroll
      for (int j = 0; j < 2 * blocks; ++j) {
        if (!own.has(j / 4)) continue;
        const int col = own.col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
        D[i / 2][j / 2][i % 2 * 2 + j % 2] +=
            weight * float(at(B, k, col / in_chunk)[col % in_chunk]);
      }
    }
  }
}

// Whether a row of the tile takes part, and sees a key. Rows that see none, or are none of M, have
// lse = -infinity.
__device__ __forceinline__ bool counts(const Pairs& pairs, float lse, int row, int key) {
  return lse != -infinity && pairs.see(row, key);
}

// S becomes P = 2^(S * scale2 - lse), of an lse in powers of two.
template <bool masked, class Own, int rows, int blocks>
__device__ __forceinline__ void weigh(float (&S)[rows][blocks][4], const float (&lse)[Br],
                                      const Own& own, Pairs pairs, float scale2, int lane) {
  pairs.first_key = opaque(pairs.first_key);  // registers do not keep what counts
#pragma unroll
  for (int i = 0; i < 2 * rows; ++i) {
    const int row = own.row + i * 8 + lane / 4;
    const float exponent = lse[row];
#pragma unroll
    for (int j = 0; j < 2 * blocks; ++j) {
      float& x = S[i / 2][j / 2][i % 2 * 2 + j % 2];
      const int key = own.col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
      x = exp2f(x * scale2 - exponent);
      if (masked && !counts(pairs, exponent, row, key)) x = 0;
    }
  }
}

// dP = dO V^T becomes dS = P * (dP - delta), without the scale.
template <bool masked, class Own, int rows, int blocks>
__device__ __forceinline__ void slope(float (&dP)[rows][blocks][4],
                                      const float (&P)[rows][blocks][4], const float (&lse)[Br],
                                      const float (&delta)[Br], const Own& own, Pairs pairs,
                                      int lane) {
  pairs.first_key = opaque(pairs.first_key);  // registers do not keep what counts
#pragma unroll
  for (int i = 0; i < 2 * rows; ++i) {
    const int row = own.row + i * 8 + lane / 4;
    const float mean = delta[row];
#pragma unroll
    for (int j = 0; j < 2 * blocks; ++j) {
      float& x = dP[i / 2][j / 2][i % 2 * 2 + j % 2];
      const int key = own.col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
      x = P[i / 2][j / 2][i % 2 * 2 + j % 2] * (x - mean);
      if (masked && !counts(pairs, lse[row], row, key)) x = 0;
    }
  }
}

// Writes a warp's part of P or dS, rounded to 16 bits.
template <class Own, int rows, int blocks>
__device__ __forceinline__ void store_weights(operand (&tile)[Br][Bc],
                                              const float (&weights)[rows][blocks][4],
                                              const Own& own, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * rows; ++i) {
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      operand* to = at(tile, own.row + lane / 4, own.col / 8 + n, i * 8) + 2 * (lane % 4);
      *reinterpret_cast<unsigned*>(to) =
          pack<operand>(weights[i / 2][n][i % 2 * 2], weights[i / 2][n][i % 2 * 2 + 1]);
    }
  }
}

// Writes a warp's part of a gradient times a factor, in rows of which there are so many, and in
// columns before `end_col`.
template <int cols, class Own, int rows, int blocks>
__device__ __forceinline__ void store_gradient(Tensor<scalar> gradient,
                                               const float (&sums)[rows][blocks][4], float factor,
                                               const Own& own, int batch, int head, int first_row,
                                               int end, int lane, int end_col = cols) {
  const bool aligned = is_aligned(gradient);
#pragma unroll
  for (int i = 0; i < 2 * rows; ++i) {
    const int row = first_row + own.row + i * 8 + lane / 4;
    unsigned pairs[blocks];
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      const float (&sum)[4] = sums[i / 2][n];
      pairs[n] = pack<operand>(sum[i % 2 * 2] * factor, sum[i % 2 * 2 + 1] * factor);
    }
    store_row<cols>(gradient.row(batch, head, row), pairs, own.col, aligned, row < end, lane,
                    end_col);
  }
}

// lse, in powers of two, and delta of a thread's rows of a tile, on their way to shared memory.
struct RowSums {
  static constexpr int count = cdiv(Br, threads);
  float lse[count], delta[count];
  bool dead = false;  // one of them is a row that sees no key

  __device__ __forceinline__ void load(Tensor<const real> all_lse, Tensor<const real> all_delta,
                                       int batch, int head, int first_row, int M) {
    dead = false;
    share_out<Br, count>([&](int i, int turn) {
      const int row = first_row + i;
      lse[turn] = -infinity;
      delta[turn] = 0;
      if (row >= M) return;
      lse[turn] = *all_lse.row(batch, head, row) * log2e;
      if (lse[turn] == -infinity)
        dead = true;
      else
        delta[turn] = *all_delta.row(batch, head, row);
    });
  }
  __device__ __forceinline__ void store(float (&to_lse)[Br], float (&to_delta)[Br]) const {
    share_out<Br, count>([&](int i, int turn) {
      to_lse[i] = lse[turn];
      to_delta[i] = delta[turn];
    });
  }
};

// Zeros for rows that see no key: whatever stands in them does not count.
template <int columns>
__device__ __forceinline__ void clear_dead_rows(operand (&tile)[Br][columns],
                                                const float (&lse)[Br]) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Br * columns; i += threads) {
    const int row = i / columns, col = i % columns;
    if (lse[row] == -infinity) at(tile, row, col / in_chunk)[col % in_chunk] = operand(0.0f);
  }
}
