#pragma once
// Stores dK and dV computed from split float32 operands, and flags keys with inaccurate sums.

#include <backward/parts/split_f32/split_gradients.cuh>
#include <forward/parts/split_f32/column_bits.cuh>
#include <timeline.cuh>

template <int d, int dv>
struct SplitKeys {
  const unsigned* column_bits;  // see column_bits.cuh
  long long own_head;
  int batch, kv_head, group;
  const Extent& extent;

  // Returns the factor of dK. The weights already include the row units: scale * log2(e), unless
  // an expression modifies scores. mean_cut() corrects for truncation by the tensor cores.
  static __device__ __forceinline__ float of_units(float scale) {
    return (has_score_mod ? scale : float(ln2)) / (1 + mean_cut(d));
  }
  // Returns whether a small sum in a column of dK or dV may be inaccurate (column_bits.cuh).
  template <bool of_V>
  __device__ bool is_inaccurate(int col, bool tiny) const {
    for (int i = 0; i < group; ++i)
      if (has_small_numbers(column_words(column_bits, own_head, group, 1 + 2 * i + of_V), col,
                            tiny))
        return true;
    return false;
  }
  // Stores dK or dV of the warp's 16 keys from `first` on, and the keys' flags.
  template <bool of_V, int n>
  __device__ __forceinline__ void store(const float (&sums)[1][n][4], const Largest<1>& largest,
                                        Tensor<result> gradient, Tensor<unsigned char> flags,
                                        const int* exponents, float scale, int first,
                                        int lane) const {
    const timeline::Phase phase(timeline::epilogue);
    constexpr int cols = of_V ? dv : d;
    const int* own_exponents = exponents + own_head * cols;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float least = !of_V && scale == 0 ? 0 : largest.least_sum(0, half);
      const bool wrong = is_wrong<cols>(sums, 0, half, least, lane, [&](int col) {
        return is_inaccurate<of_V>(col, largest.weight[0][half] < largest.least_weight);
      });
      const int key = first + half * 8 + lane / 4;
      if (lane % 4 == 0 && key < extent.N) *flags.row(batch, kv_head, key) = wrong;
    }
    const float factor = of_V ? extent.kept_factor() : of_units(scale);
    store_scaled<cols>(sums, factor, gradient, batch, kv_head, first, extent.N, lane,
                       [&](int col) { return -key_exponent - own_exponents[col]; });
  }
};
