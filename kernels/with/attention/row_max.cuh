#pragma once
// The largest score of each row, which a call may request besides lse. It differs from the
// softmax's maximum, which may include a sink, be rounded, or lag behind slightly larger scores.

#include <tile/math.cuh>

// Number of maxima that a key split stores per row: the softmax's, and the largest score.
constexpr int stored_maxima = has_row_max ? 2 : 1;

// The largest scores so far of some rows; empty unless the call requests them.
template <int rows, bool kept = has_row_max>
struct RowMaxima {
  __device__ __forceinline__ real row_max(int) const { return -infinity; }
  __device__ __forceinline__ void set_row_max(int, real) {}
  __device__ __forceinline__ void raise_row_max(int, real) {}
};
template <int rows>
struct RowMaxima<rows, true> {
  real largest_score[rows];

  __device__ __forceinline__ RowMaxima() {
    for (real& x : largest_score) x = -infinity;
  }
  __device__ __forceinline__ real row_max(int row) const { return largest_score[row]; }
  __device__ __forceinline__ void set_row_max(int row, real score) { largest_score[row] = score; }
  __device__ __forceinline__ void raise_row_max(int row, real score) {
    largest_score[row] = fmax(largest_score[row], score);
  }
};

// Writes the largest score of a row if the call requests it, or NaN if the row's sum of weights is
// NaN. With packed GQA, `more` is the head's distance from the first head of the tile.
template <class Extent>
__device__ __forceinline__ void write_row_max(const Extent& extent, int row, real score, real sum,
                                              int more = 0) {
  if constexpr (has_row_max)
    extent.store_row_max(extent.packed_row(row), more, sum == sum ? score : sum);
}
