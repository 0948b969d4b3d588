#pragma once
// Split float32: x * 2^s = high + low / 2^11 with two float16 numbers. Scaling by 2^s is exact and
// brings the largest |x| to 2^14 … 2^15, within the range of float16. The low part is stored 2^11
// times larger, so that it does not underflow before the high part does. Tensor cores truncate
// sums, so each tile is accumulated from zero, and ordinary float additions, which round to
// nearest, add it to the running sum. Inaccurate rows and keys are flagged, and the last launch
// recomputes them from the float32 arrays (`repair_split_output`, `repair_split_gradients`).

#include <ptx/pack.cuh>
#include <tile/math.cuh>
#include <tile/powers.cuh>

constexpr int split_exponent = 14;  // exponent of the largest numbers after scaling
constexpr float low_unit = 0x1p-11f;

// Returns the mean relative error of a dot product of `columns` terms. After every 16 columns
// Hopper truncates the partial sum, which loses half an ulp on average: 0.72 * 2^-23 of a partial
// sum that averages half the result. Other architectures, not measured, use the same factor.
__host__ __device__ constexpr float mean_cut(int columns) {
  return float((columns + 15) / 16) * (0.5f * 0.5f * 0.72f * 0x1p-23f);
}

// Returns e with 2^e <= |x| < 2^(e + 1), or -127 for 0 and for subnormals, which -ftz turns into 0.
__device__ __forceinline__ int exponent_of(float x) {
  return int(__float_as_uint(x) >> 23 & 255) - 127;
}

// Splits two neighbouring numbers into packed high and low parts.
template <class T>
__device__ __forceinline__ void split_pair(float x, float y, unsigned& high, unsigned& low) {
  static_assert(is_half<T>, "parts need the mantissa of float16");
  high = pack<T>(x, y);
  const T* rounded = reinterpret_cast<const T*>(&high);
  low = pack<T>((x - float(rounded[0])) * 0x1p11f, (y - float(rounded[1])) * 0x1p11f);
}
