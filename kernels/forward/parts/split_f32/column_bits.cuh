#pragma once
// Which columns of K, Q and dO may have inaccurate small sums in gradients. Sums of zeros are
// exact. If no number of a column is below least_number, the largest weight's product is not below
// Largest::least_sum(): a smaller sum has terms that cancel, and is accurate.

#include <tile/warp.cuh>

constexpr float least_number = 0x1p-10f;  // of scaled numbers, which are below 2^15

// `column_bits` [batch, kv_heads, 1 + 2 * group, 32] has words for K, then for Q and dO of each
// query head. Word l has two bits for each column of lane l in SplitRow: whether the column has
// a number other than 0, and 16 bits higher, whether it has one below least_number.
template <class T>
__device__ __forceinline__ T* column_words(T* column_bits, long long kv_head, int group, int i) {
  return column_bits + (kv_head * (1 + 2 * group) + i) * warp_size;
}

// Returns whether column `col` has numbers below least_number other than 0, or just other than 0.
__device__ __forceinline__ bool has_small_numbers(const unsigned* words, int col, bool any) {
  const unsigned bits = words[col / 2 % warp_size] >> (col / 2 / warp_size * 2 + col % 2);
  return bits & (bits >> 16 | any) & 1;
}
