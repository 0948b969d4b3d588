#pragma once
// Operands of double products (mma_f64.cuh), loaded from swizzled tiles. A sum may take its terms
// in any order: of every 16 summed columns or rows, a lane holds 2c, 2c + 1, 2c + 8 and 2c + 9,
// with c = l % 4. It thus reads two columns at once, and the accumulators of one product have the
// layout of the next product's operand.

#include <ptx/mma_f64.cuh>
#include <tile/async_copy.cuh>
#include <tile/warp.cuh>

// Operands whose rows are consecutive rows of a tile, starting at row `first`, a multiple of 8.
template <int columns>
struct AlongRows {
  const operand *low, *high;

  template <int height>
  __device__ __forceinline__ AlongRows(operand (&tile)[height][columns], int first, int lane)
      : low(at(tile, first + lane / 4, lane % 4)), high(at(tile, first + lane / 4, lane % 4 + 4)) {}

  // Loads row l / 4 + below from column 16 * k on; `below` is a multiple of 8.
  __device__ __forceinline__ void load(double (&b)[4], int below, int k) const {
    const int place = below * columns + k * step;  // the swizzle repeats every 8 rows
    const double2 x = *reinterpret_cast<const double2*>(low + place);
    const double2 y = *reinterpret_cast<const double2*>(high + place);
    b[0] = x.x, b[1] = x.y, b[2] = y.x, b[3] = y.y;
  }
  // Loads an operand A: this row and the row 8 below it.
  __device__ __forceinline__ void load(double (&a)[8], int below, int k) const {
    double rows[2][4];
    load(rows[0], below, k);
    load(rows[1], below + 8, k);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = rows[i % 2][i / 2];
  }
};

// Operands whose rows are columns of a tile, from column `first` on, a multiple of 16.
template <int columns>
struct DownColumns {
  const operand *even, *odd;  // in the lane's first row: even and odd blocks of 8 columns

  template <int height>
  __device__ __forceinline__ DownColumns(operand (&tile)[height][columns], int first, int lane)
      : even(&at(tile, lane % 4 * 2, (first + lane / 4) / in_chunk)[lane / 4 % in_chunk]),
        odd(&at(tile, lane % 4 * 2, (first + lane / 4) / in_chunk + 4)[lane / 4 % in_chunk]) {}

  // Loads column l / 4 + 8 * n from row 16 * k on. In odd rows, halves of 16 columns are swapped.
  __device__ __forceinline__ void load(double (&b)[4], int k, int n) const {
    const int place = k * step * columns + n / 2 * step;
    const operand *own = (n % 2 ? odd : even) + place, *next = (n % 2 ? even : odd) + place;
    b[0] = own[0], b[1] = next[columns], b[2] = own[8 * columns], b[3] = next[9 * columns];
  }
  // Loads an operand A: this column and the column 8 to the right.
  __device__ __forceinline__ void load(double (&a)[8], int k, int n) const {
    double both[2][4];
    load(both[0], k, n);
    load(both[1], k, n + 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = both[i % 2][i / 2];
  }
};
