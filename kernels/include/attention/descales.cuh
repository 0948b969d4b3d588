#pragma once
// Descales of Q, K and V, one factor for each batch element and key head. Here they are 1. For e4m3
// inputs the host replaces this header with kernels/with/attention/descales.cuh.

#include <attention/score.cuh>
#include <tile/tensor.cuh>

// The descales of one head.
struct Descales {
  float q = 1, k = 1, v = 1;
};
template <class Arrays>
__device__ __forceinline__ Descales descales_of(const Arrays&, int, int) {
  return {};
}
__device__ __forceinline__ bool are_finite(const Descales&) {
  return true;
}

// Factors of Q, K and their product, for rows that are recomputed score by score.
struct Factors {
  float Q, K, scores;
};
__device__ __forceinline__ Factors for_repair(const Descales&) {
  return {1, 1, 1};
}
template <class T>
__device__ __forceinline__ Tensor<const T> descaled(Tensor<const T> rows, float) {
  return rows;
}

// Multiplies products by the descales of Q and K before scoring them.
template <class T>
struct DescaledScorer {
  const Scorer<T>& scorer;
  float factor;

  __device__ __forceinline__ T modified(T product, const Extent& extent, Index row,
                                        Index key) const {
    return scorer.modified(product, extent, row, key);
  }
};
