#pragma once
// Products of the backward pass of doubles on tensor cores, and what becomes of their sums.

#include <backward/parts/cold_path.cuh>
#include <backward/parts/repair_gradients.cuh>
#include <tile/f64_fragments.cuh>
#include <timeline.cuh>

// D += A B^T for rows of both: steps `first` … `end` - 1 of 16 columns.
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

// D += A B, or D += A^T B: sums over the rows of B.
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

// Writes a warp's part of P or dS.
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

// Writes m times 16 rows of a gradient times a factor: columns from first_col on, before `end_col`,
// of rows before `end`.
template <int m, int n>
__device__ __forceinline__ void write_gradient(const double (&sums)[m][n][4], double factor,
                                               Tensor<result> gradient, int batch, int head,
                                               int first_row, int end, int lane, int first_col,
                                               int end_col) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = first_row + i * 8 + lane / 4;
    if (row >= end) continue;
    result* to = gradient.row(batch, head, row);
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      const int col = first_col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
      if (col < end_col) to[col] = sums[i / 2][j / 2][i % 2 * 2 + j % 2] * factor;
    }
  }
}
