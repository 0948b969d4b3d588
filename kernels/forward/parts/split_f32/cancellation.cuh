#pragma once
// Detects cancellation: some rows are accurate in spite of a small element of O, because their
// values are large compared to the errors of the split, and cancel.
//
// A weight lacks up to 2^-51 of its row's largest, which is about 1, and a value as much of the
// largest in its column. So O lacks up to 2^-50 n / l of that value, for n keys whose weights add
// up to l. The bound of float32 has a term of 2^-23 * 1.2 sqrt(n) sum(p |v|) / l. If c values of
// the column are below t, sum(p |v|) is at least t (l - w c), for the largest weight w: up to
// 2^(1/4), as the maximum is rounded. With t from small_value(), O lacks at most half of that term
// if c < l / 2.

#include <attention/score.cuh>
#include <forward/parts/split_f32/split_pair.cuh>

// Dropped weights and the sink are in l, but have no values.
constexpr bool counts_values = !ragged && !has_dropout && !has_sink;

constexpr float least_share = 0x1p-23f * 0x1p15f;  // larger elements of O are accurate

// The threshold t for this number of keys, in the units of the split V; less than 2^15.
__device__ __forceinline__ float small_value(int keys) {
  return 0x1p-10f * sqrtf(float(keys));
}

// The flag of a row that is accurate unless its columns have many small values is 2 + log2(l),
// rounded down. The flag of a row that is not accurate is 1.
__device__ __forceinline__ unsigned char flag_of_sum(float sum) {
  return counts_values ? max(exponent_of(sum) + 2, 1) : 1;
}
// Returns how many small values are too many: half of l, or one.
__device__ __forceinline__ int many_of_flag(int flag) {
  return 1 << max(flag - 3, 0);
}
