#pragma once
// Tensor-core products of 16-bit tiles in shared memory, for the backward pass.

#include <ptx/mma.cuh>
#include <tile/async_copy.cuh>
#include <tile/chunk_addresses.cuh>
#include <timeline.cuh>

static_assert(sizeof(operand) != 4, "these tensor-core products take 16-bit numbers or doubles");

// Computes one step of D += A B, summed over 16 rows of B. load() loads B 16 columns at a time.
template <int rows, int blocks, class Own, class Load>
__device__ __forceinline__ void multiply_step(float (&D)[rows][blocks][4],
                                              const unsigned (&a)[rows][4], const Own& own,
                                              Load load) {
#pragma unroll
  for (int n = 0; n < blocks / 2; ++n) {
    if (!own.has(n)) continue;
    unsigned b[4];
    load(b, n);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      multiply_add<operand>(D[i][2 * n], a[i], b[0], b[1]);
      multiply_add<operand>(D[i][2 * n + 1], a[i], b[2], b[3]);
    }
  }
}

// Computes D += A B^T with the reduction loop unrolled `at_once` times. Larger factors make the
// compiler load fragments ahead, into registers that other values need.
template <int at_once = 2, class Own, int rows, int blocks, int height, int other, int length>
__device__ __forceinline__ void multiply_transposed(float (&D)[rows][blocks][4],
                                                    operand (&A)[height][length],
                                                    operand (&B)[other][length], const Own& own,
                                                    int lane) {
  const timeline::Phase phase(timeline::products);
  const ChunkAddresses of_A(A, own.row + lane % 16, lane / 16);
  const ChunkAddresses of_B(B, own.col + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll at_once
  for (int k = 0; k < length / step; ++k) {
    unsigned a[rows][4];
#pragma unroll
    for (int i = 0; i < rows; ++i) ldmatrix(a[i], of_A(i * step, 2 * k));
    multiply_step(D, a, own, [&](unsigned (&b)[4], int n) { ldmatrix(b, of_B(n * step, 2 * k)); });
  }
}

// Computes D += A B, or D += A^T B if of_columns is set. The sum runs over the rows of B.
template <bool of_columns, class Own, int rows, int blocks, int height, int length, int other,
          int columns>
__device__ __forceinline__ void multiply_tiles(float (&D)[rows][blocks][4],
                                               operand (&A)[height][length],
                                               operand (&B)[other][columns], const Own& own,
                                               int lane) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < other / step; ++k) {
    unsigned a[rows][4];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      if constexpr (of_columns) {
        const int row = lane / 16 * 8 + lane % 8, chunk = own.row / 8 + 2 * i + lane / 8 % 2;
        ldmatrix_trans(a[i], at(A, row, chunk, k * step));
      } else {
        ldmatrix(a[i], ChunkAddresses(A, own.row + lane % 16, lane / 16)(i * step, 2 * k));
      }
    }
    multiply_step(D, a, own, [&](unsigned (&b)[4], int n) {
      const int chunk = own.col / 8 + 2 * n + lane / 16;
      ldmatrix_trans(b, at(B, lane % 16, chunk, k * step));
    });
  }
}

// Rounds the warp's part of P or dS to 16 bits and stores it in shared memory.
template <class Own, int m, int n, int rows, int keys>
__device__ __forceinline__ void store_tile(operand (&tile)[rows][keys], const real (&part)[m][n][4],
                                           const Own& own, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      operand* to = at(tile, own.row + lane / 4, own.col / 8 + j, i * 8) + 2 * (lane % 4);
      *reinterpret_cast<unsigned*>(to) =
          pack<operand>(part[i / 2][j][i % 2 * 2], part[i / 2][j][i % 2 * 2 + 1]);
    }
  }
}
