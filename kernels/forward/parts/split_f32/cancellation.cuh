#pragma once
// Detects cancellation: a small element of O is still accurate if the values are large compared
// with the errors of the split and merely cancel each other.
//
// A weight is off by at most 2^-51 of its row's largest weight, which is about 1, and a value by at
// most 2^-51 of its column's largest value. For n keys with weights that add up to l, O is off by
// at most 2^-50 n / l of the column's largest value. The error bound of float32 has a term
// 2^-23 * 1.2 sqrt(n) sum(p |v|) / l. If c values of the column are below t, sum(p |v|) is at least
// t (l - w c), where the largest weight w is at most 2^(1/4), as the maximum is rounded. With t
// from small_value(), O is off by at most half of that term if c < l / 2.

#include <attention/score.cuh>
#include <forward/parts/split_f32/split_pair.cuh>

// Whether small values are counted. Dropped weights and sinks add to the weight sum, but not to O.
constexpr bool counts_values = !ragged && !has_dropout && !has_sink;

constexpr float least_share = 0x1p-23f * 0x1p15f;  // larger elements of O are accurate

// Returns the threshold t for a number of keys, in units of the split V; it is less than 2^15.
__device__ __forceinline__ float small_value(int keys) {
  return 0x1p-10f * sqrtf(float(keys));
}

// Returns the flag of a row whose weights add up to l: 1 if the row is inaccurate in any case, or
// 2 + log2(l), rounded down, if it is inaccurate only where a column has many small values.
__device__ __forceinline__ unsigned char flag_of_sum(float sum) {
  return counts_values ? max(exponent_of(sum) + 2, 1) : 1;
}
// Returns how many small values make a flagged row inaccurate: half the weight sum l, at least 1.
__device__ __forceinline__ int many_of_flag(int flag) {
  return 1 << max(flag - 3, 0);
}
