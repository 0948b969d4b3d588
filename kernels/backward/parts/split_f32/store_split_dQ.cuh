#pragma once
// Stores dQ computed from split float32 operands, and flags rows with inaccurate sums.

#include <backward/parts/split_f32/split_gradients.cuh>
#include <forward/parts/split_f32/column_bits.cuh>
#include <timeline.cuh>

// Stores m * 16 rows of dQ from `first` on and flags rows with inaccurate sums. `exponents` and
// `words` (column_bits.cuh) are those of K's columns.
template <int cols, int m, int n>
__device__ __forceinline__ void store_dQ(const float (&sums)[m][n][4], const Largest<m>& largest,
                                         const int* exponents, const unsigned* words, float scale,
                                         Tensor<result> dQ, Tensor<unsigned char> flags, int batch,
                                         int head, int first, int end, int lane) {
  const timeline::Phase phase(timeline::epilogue);
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const float least = largest.least_sum(i / 2, i % 2);
    const bool wrong = is_wrong<cols>(sums, i / 2, i % 2, least, lane, [&](int col) {
      return has_small_numbers(words, col, largest.weight[i / 2][i % 2] < largest.least_weight);
    });
    const int row = first + i * 8 + lane / 4;
    if (lane % 4 == 0 && wrong && row < end) *flags.row(batch, head, row) = 1;
  }
  store_scaled<cols>(sums, scale, dQ, batch, head, first, end, lane,
                     [&](int col) { return exponents[col] - row_exponent; });
}
