#pragma once
// Epilogue for split float32 operands: flags inaccurate rows and undoes the scaling of V in O.

#include <forward/parts/split_f32/cancellation.cuh>
#include <forward/parts/split_f32/split_softmax.cuh>

// Returns whether a maximum is so large that the largest weight may overflow: weights depend on
// differences of scores, and scores from 2^24 on are rounded to whole numbers.
__device__ __forceinline__ bool is_beyond_split(real maximum) {
  return !(fabs(maximum) < 0x1p24f);
}

// Returns the smallest magnitude of O / sum that is known to be accurate; below it the errors of
// the low parts of weights and values may exceed float32 rounding. The result is in units of the
// split V (split_operands.cu) and less than 2^15. A mask expression may hide most keys in range,
// but at least `sum` keys are visible, because no weight is above 1.
__device__ __forceinline__ float least_output(float sum, const Extent& extent, int query) {
  const float keys = has_mask_mod ? sum : float(extent.kv_end(query) - extent.kv_begin(query));
  return least_share * rsqrtf(sum * fmax(keys, 1.0f));
}

// Flags the warp's rows of O / sum that may be inaccurate (cancellation.cuh) and have no flag yet.
// `exponents` are those of V's columns. Rows whose weights are all 0 are exactly 0.
template <int cols, int m, int n, int pack_gqa>
__device__ __forceinline__ void flag_rows(const float (&O)[m][n][4],
                                          const SplitRows<m * step, pack_gqa>& rows,
                                          const int* exponents, Tensor<unsigned char> flags,
                                          int batch, int head, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    float sum = rows.sum[i / 2][i % 2];
    sum += __shfl_xor_sync(full_warp, sum, 1);
    sum += __shfl_xor_sync(full_warp, sum, 2);
    const int row = rows.row(i / 2, i % 2), query = row / pack_gqa;
    const float least = least_output(sum, rows.extent, query);
    bool small = false;
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
      const float o = fabs(O[i / 2][j / 2][i % 2 * 2 + j % 2]);
      if (col < cols && !(o >= least)) small |= exponents[col] > -127;  // skips columns of zeros
    }
    const real maximum = rows.maximum[i / 2][i % 2];
    // A sink near the lowest number overflows as an exponent of two, and its row has a sum.
    const bool has_none = maximum == -largest && !(has_sink && sum != 0);
    const bool wrong = !(sum < infinity) || (!has_none && is_beyond_split(maximum));
    // One lane per row updates the row's flag.
    const bool is_small = __ballot_sync(full_warp, small) >> (lane & ~3) & 15;
    if ((wrong || (is_small && sum != 0)) && lane % 4 == 0 && row < rows.extent.M * pack_gqa) {
      unsigned char& flag = *flags.row(batch, head * pack_gqa + row % pack_gqa, query);
      if (wrong || flag == 0) flag = wrong ? 1 : flag_of_sum(sum);
    }
  }
}

// Undoes the scaling of V's columns by powers of two in O.
template <int cols, int m, int n>
__device__ __forceinline__ void scale_columns(float (&O)[m][n][4], const int* exponents, int lane) {
#pragma unroll
  for (int j = 0; j < 2 * n; ++j) {
    const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
    const int power = (col < cols ? exponents[col] : 0) - split_exponent, first = power >> 1;
#pragma unroll
    for (int i = 0; i < 2 * m; ++i) {
      float& o = O[i / 2][j / 2][i % 2 * 2 + j % 2];
      o = o * two_to(first) * two_to(power - first);
    }
  }
}
