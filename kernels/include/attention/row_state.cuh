#pragma once
// The rows of S, P and O that a warp owns, in the fragments of mma.cuh, with their maxima and sums.

#include <attention/extent.cuh>
#include <attention/row_max.cuh>
#include <ptx/opaque.cuh>
#include <ptx/pack.cuh>

constexpr real largest = real(sizeof(real) == 8 ? 0x1.fffffffffffffp1023 : 0x1.fffffep127);

// A warp's rows of S, P or O, in fragments of 16 rows and 8 columns.
template <int rows, int columns>
using Fragments = real[rows / step][columns / 8][4];

// The softmax state of a warp's Wr rows. A lane holds parts of two rows in every 16: its row i is
// half i % 2 of block i / 2. Its maximum is complete, its sum partial until finish_rows(). S *
// scale2 is an exponent of 2. With packed GQA, row r is query r / pack_gqa of head r % pack_gqa.
template <int Wr, int pack_gqa = 1>
struct Rows : RowMaxima<2 * (Wr / step)> {
  static constexpr int heads = pack_gqa;
  int first;  // the lane's first row
  Extent extent;
  real scale2, maximum[Wr / step][2], sum[Wr / step][2];

  // Initialises maxima with the lowest finite number, because -infinity would make a fully masked
  // row NaN. With split-KV only one split includes the sink.
  __device__ __forceinline__ Rows(int first, const Extent& extent, real scale2,
                                  [[maybe_unused]] bool takes_sink = true)
      : first(first), extent(extent), scale2(scale2), sum() {
    for (int i = 0; i < 2 * (Wr / step); ++i) maximum[i / 2][i % 2] = -largest;
    if constexpr (has_sink) begin_with_sinks(*this, takes_sink);
  }
  __device__ __forceinline__ int row(int i, int half) const {
    return opaque(first) + i * step + half * 8;
  }
  // Returns the row, clamped to the last one, as an index into arrays of expressions.
  __device__ __forceinline__ int existing(int i, int half) const {
    return min(first + i * step + half * 8, extent.M * pack_gqa - 1);
  }
  // Converts a maximum to an exponent of two. If finite modified scores overflow to -infinity, as
  // if masked, the result stays above -largest, and the row is recomputed (nonfinite.cuh).
  __device__ __forceinline__ real exponent_of(real maximum) const {
    if constexpr (!has_expressions) return maximum * scale2;
    return fmax(maximum * scale2, maximum != -infinity ? -largest / 2 : -infinity);
  }
  // Raises the largest score of row (i / 2, i % 2) to x * unit * ln2, where `unit` converts x to an
  // exponent of two. unit * ln2 is computed first, because x * unit may overflow; log2e * ln2 is 1.
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

// Calls body(i, j, e) for the elements of P that dropout drops, after they were added to the sums.
// Visits groups `first` to `end` - 1 of 16 keys; group g is fragment columns 2 * g and 2 * g + 1.
template <int m, int n, int pack_gqa, class Body>
__device__ __forceinline__ void for_dropped(const real (&P)[m][n][4], int first, int end,
                                            const Rows<m * step, pack_gqa>& rows, int first_key,
                                            Body body) {
  if constexpr (has_dropout) for_dropped_weights(P, first, end, rows, first_key, body);
}
