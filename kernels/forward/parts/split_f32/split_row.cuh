#pragma once
// Splits rows of Q or dO. Each element is first multiplied by the power of two of its column in K
// or V; then each row is scaled by its own power of two.

#include <forward/parts/split_f32/column_bits.cuh>
#include <forward/parts/split_f32/split_pair.cuh>
#include <tile/times_two_to.cuh>
#include <tile/warp_max.cuh>

// Reads the column exponents of a head's K and V from the table of split_maxima. Returns whether
// the head contains NaN or infinity.
template <int threads, int slabs, int columns>
__device__ __forceinline__ bool read_exponents(const float* maxima, int (&exponents)[columns]) {
  constexpr int line = columns + 1;
  for (int col = threadIdx.x; col < columns; col += threads) {
    float largest = 0;
#pragma unroll 8
    for (int slab = 0; slab < slabs; ++slab) largest = fmax(largest, maxima[slab * line + col]);
    exponents[col] = exponent_of(largest);
  }
  bool special = false;
  for (int slab = threadIdx.x; slab < slabs; slab += threads)
    special |= maxima[slab * line + columns] != 0;
  return __syncthreads_or(special);
}

__device__ __forceinline__ bool is_finite(float x) {
  return fabs(x) < infinity;
}

// Returns both bits of a number of a column (column_bits.cuh).
__device__ __forceinline__ unsigned bits_of(float number, float scaled) {
  return unsigned(number != 0) | unsigned(fabs(scaled) < least_number) << 16;
}

// A row of Q or dO; each lane holds every 32nd pair of columns.
template <int cols>
struct SplitRow {
  static constexpr int pairs = cdiv(cols, step) * step / 2, count = cdiv(pairs, warp_size);
  float x[count][2];
  int exponent = -254;  // exponent of the largest |x| after column scaling
  bool finite = true;

  __device__ __forceinline__ SplitRow(const scalar* from, const int* exponents, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * count; ++i) {
      const int col = 2 * (lane + i / 2 * warp_size) + i % 2;
      const float number = col < cols ? from[col] : 0.0f;
      finite &= is_finite(number);
      x[i / 2][i % 2] = is_finite(number) ? number : 0.0f;
      if (col < cols) exponent = max(exponent, exponent_of(x[i / 2][i % 2]) + exponents[col]);
    }
    exponent = int(warp_max(float(exponent)));
    finite = __all_sync(full_warp, finite);
  }

  __device__ __forceinline__ bool is_zero() const {
    bool zero = true;
#pragma unroll
    for (int i = 0; i < 2 * count; ++i) zero &= x[i / 2][i % 2] == 0;
    return __all_sync(full_warp, zero);
  }

  // Writes both parts, and returns the row's word of column_bits.cuh.
  template <class T>
  __device__ __forceinline__ unsigned split(T* high, T* low, const int* exponents, float sign,
                                            int lane) const {
    static_assert(count <= 8, "a word has two bits for each column of a lane");
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int col = 2 * (lane + i * warp_size);
      const auto at = [&](int j) {
        if (col + j >= cols) return 0.0f;
        return sign * times_two_to(x[i][j], split_exponent + exponents[col + j] - exponent);
      };
      const float pair[2] = {at(0), at(1)};
      bits |= bits_of(x[i][0], pair[0]) << 2 * i | bits_of(x[i][1], pair[1]) << (2 * i + 1);
      unsigned high_pair, low_pair;
      split_pair<T>(pair[0], pair[1], high_pair, low_pair);
      if (col >= 2 * pairs) break;
      *reinterpret_cast<unsigned*>(high + col) = high_pair;
      *reinterpret_cast<unsigned*>(low + col) = low_pair;
    }
    return bits;
  }
};
