#pragma once
// The rows of S, P and O that a warp owns, in the fragments of mma.cuh, with their maxima and sums.

#include <attention/extent.cuh>
#include <attention/row_max.cuh>
#include <ptx/opaque.cuh>
#include <ptx/pack.cuh>

constexpr real largest = real(sizeof(real) == 8 ? 0x1.fffffffffffffp1023 : 0x1.fffffep127);

// A warp's rows of S, P or O: products of 16 rows and 8 columns.
template <int rows, int columns>
using Fragments = real[rows / step][columns / 8][4];

// The softmax of a warp's Wr rows. A lane has parts of two rows in each 16: row i is half i % 2 of
// block i / 2. Its maximum is whole in all four lanes of a row, its sum partial until finish_rows.
// scale2 makes exponents of 2. Packed rows r are query r / pack_gqa of head r % pack_gqa.
template <int Wr, int pack_gqa = 1>
struct Rows : RowMaxima<2 * (Wr / step)> {
  static constexpr int heads = pack_gqa;
  int first;  // the lane's first row
  Extent extent;
  real scale2, maximum[Wr / step][2], sum[Wr / step][2];

  // Maxima begin with the lowest finite number: -infinity would make NaN of a row that is masked.
  // Where the keys of a row are split, only one of the splits takes the sink.
  __device__ __forceinline__ Rows(int first, const Extent& extent, real scale2,
                                  [[maybe_unused]] bool takes_sink = true)
      : first(first), extent(extent), scale2(scale2), sum() {
    for (int i = 0; i < 2 * (Wr / step); ++i) maximum[i / 2][i % 2] = -largest;
    if constexpr (has_sink) begin_with_sinks(*this, takes_sink);
  }
  __device__ __forceinline__ int row(int i, int half) const {
    return opaque(first) + i * step + half * 8;
  }
  // The row as an index for expressions, whose arrays end with the last row.
  __device__ __forceinline__ int existing(int i, int half) const {
    return min(first + i * step + half * 8, extent.M * pack_gqa - 1);
  }
  // A maximum as an exponent of two. If finite modified scores overflow to -infinity, as if their
  // keys were hidden, it stays above -largest, and the row is computed again (nonfinite.cuh).
  __device__ __forceinline__ real exponent_of(real maximum) const {
    if constexpr (!has_expressions) return maximum * scale2;
    return fmax(maximum * scale2, maximum != -infinity ? -largest / 2 : -infinity);
  }
  // Raises the largest score of row (i / 2, i % 2) to x, which `unit` converts to an exponent of
  // two. unit * ln2 comes first, because x * unit may overflow, and log2e * ln2 is exactly 1.
  __device__ __forceinline__ void raise_row_max_to(int i, real x, real unit) {
    this->raise_row_max(i, x * (unit * ln2));
  }
  __device__ __forceinline__ bool in_reach(int i, int half, int key) const {
    return extent.in_reach(row(i, half) / pack_gqa, key);
  }
  __device__ __forceinline__ void scale(const real (&factor)[Wr / step][2]) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) sum[i / 2][i % 2] *= factor[i / 2][i % 2];
  }
  __device__ __forceinline__ void add(const real (&more)[Wr / step][2]) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) sum[i / 2][i % 2] += more[i / 2][i % 2];
  }
};

// Calls body(i, j, e) for the elements of P that dropout drops, after they were added to the sums:
// of 16 keys in columns 2 * first and 2 * first + 1, and so on up to `end`.
template <int m, int n, int pack_gqa, class Body>
__device__ __forceinline__ void for_dropped(const real (&P)[m][n][4], int first, int end,
                                            const Rows<m * step, pack_gqa>& rows, int first_key,
                                            Body body) {
  if constexpr (has_dropout) for_dropped_weights(P, first, end, rows, first_key, body);
}
