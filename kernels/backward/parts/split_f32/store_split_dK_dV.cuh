#pragma once
// Stores dK and dV computed from split float32 operands, and flags keys with inaccurate sums.

#include <backward/parts/split_f32/split_gradients.cuh>
#include <timeline.cuh>

template <int d, int dv, int row_slabs>
struct SplitKeys {
  const float* maxima;  // row maxima of the group's first query head
  long long own_head;
  int batch, kv_head, group, N;
  float kept_factor;

  __device__ __forceinline__ SplitKeys(const float* row_maxima, const Extent& extent, int batch,
                                       int kv_head, int kv_heads, int group)
      : own_head((long long)batch * kv_heads + kv_head),
        batch(batch),
        kv_head(kv_head),
        group(group),
        N(extent.N),
        kept_factor(extent.kept_factor()) {
    maxima = row_maxima + own_head * group * row_slabs * (d + dv + 1);
  }

  // Returns the factor of dK. The weights already include the row units: scale * log2(e), unless
  // an expression modifies scores. mean_cut() corrects for truncation by the tensor cores.
  static __device__ __forceinline__ float of_units(float scale) {
    return (has_score_mod ? scale : float(ln2)) / (1 + mean_cut(d));
  }
  // Returns whether column `col` of [Q, dO] has a nonzero element in any head of the group.
  __device__ bool has_numbers(int col) const {
    for (int i = 0; i < group * row_slabs; ++i)
      if (maxima[(long long)i * (d + dv + 1) + col] > 0) return true;
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
    const auto numbers = [&](int col) { return has_numbers(of_V ? d + col : col); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float least = !of_V && scale == 0 ? 0 : largest.least_sum(0, half);
      const bool wrong = is_wrong<cols>(sums, 0, half, least, lane, numbers);
      const int key = first + half * 8 + lane / 4;
      if (lane % 4 == 0 && key < N) *flags.row(batch, kv_head, key) = wrong;
    }
    const float factor = of_V ? kept_factor : of_units(scale);
    store_scaled<cols>(sums, factor, gradient, batch, kv_head, first, N, lane,
                       [&](int col) { return -key_exponent - own_exponents[col]; });
  }
};
