#pragma once
// Tensor-core products of doubles for the backward pass.

#include <backward/parts/cold_path.cuh>
#include <backward/parts/repair_gradients.cuh>
#include <tile/f64_fragments.cuh>
#include <timeline.cuh>

// Computes D += A B^T over steps `first` … `end` - 1, of 16 columns each.
template <int rows, int blocks, int height, int other, int length, class Own>
__device__ __forceinline__ void multiply_rows(double (&D)[rows][blocks][4],
                                              operand (&A)[height][length],
                                              operand (&B)[other][length], const Own& own, int lane,
                                              int first, int end) {
  const timeline::Phase phase(timeline::products);
  const AlongRows<length> of_A(A, own.row, lane), of_B(B, own.col, lane);
#pragma unroll 2
  for (int k = first; k < end; ++k) {
    double a[rows][8];
#pragma unroll
    for (int i = 0; i < rows; ++i) of_A.load(a[i], i * step, k);
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      double b[4];
      of_B.load(b, n * 8, k);
#pragma unroll
      for (int i = 0; i < rows; ++i) multiply_add_f64(D[i][n], a[i], b);
    }
  }
}

// Computes D += A B, or D += A^T B if of_columns is set. The sum runs over the rows of B.
template <bool of_columns, int rows, int blocks, int height, int length, int other, int columns,
          class Own>
__device__ __forceinline__ void multiply_columns(double (&D)[rows][blocks][4],
                                                 operand (&A)[height][length],
                                                 operand (&B)[other][columns], const Own& own,
                                                 int lane) {
  const timeline::Phase phase(timeline::products);
  const AlongRows<length> rows_of_A(A, of_columns ? 0 : own.row, lane);
  const DownColumns<length> columns_of_A(A, of_columns ? own.row : 0, lane);
  const DownColumns<columns> of_B(B, own.has(0) ? own.col : 0, lane);
#pragma unroll
  for (int k = 0; k < other / step; ++k) {
    double a[rows][8];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      if constexpr (of_columns)
        columns_of_A.load(a[i], k, 2 * i);
      else
        rows_of_A.load(a[i], i * step, k);
    }
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      if (!own.has(n / 2)) continue;
      double b[4];
      of_B.load(b, k, n);
#pragma unroll
      for (int i = 0; i < rows; ++i) multiply_add_f64(D[i][n], a[i], b);
    }
  }
}

// Stores the warp's part of P or dS in shared memory.
template <int m, int n, int rows, int keys, class Own>
__device__ __forceinline__ void store_doubles(operand (&tile)[rows][keys],
                                              const double (&part)[m][n][4], const Own& own,
                                              int lane) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      operand* to = at(tile, own.row + lane / 4, own.col / in_chunk + j * 4 + lane % 4, i * 8);
      *reinterpret_cast<double2*>(to) = {part[i / 2][j][i % 2 * 2], part[i / 2][j][i % 2 * 2 + 1]};
    }
  }
}
