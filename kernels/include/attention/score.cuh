#pragma once
// Converts products q·k to scores, and computes their derivatives. Here the score is the product
// times a positive scale. For expressions, or a scale that may not be positive, the host replaces
// this header with kernels/with/attention/score.cuh.

#include <attention/extent.cuh>

template <class T>
struct Scorer {
  T scale;
  Mods mods;

  // Returns the score of one product, which does not depend on the position of the pair.
  template <class... Pair>
  __device__ __forceinline__ T operator()(T product, const Pair&...) const {
    return product * scale;
  }
  template <class... Pair>
  __device__ __forceinline__ T modified(T product, const Pair&...) const {
    return product * scale;
  }
  template <bool is_capped = false, class... Pair>
  __device__ __forceinline__ Scored<T> with_slope(T product, const Pair&...) const {
    return {product * scale, T(1)};
  }
  // Returns the score as an exponent of two, and its slope.
  template <bool = false, class... Pair>
  __device__ __forceinline__ Scored<T> exponent_with_slope(T product, const Pair&...) const {
    return {product * (scale * T(log2e)), T(1)};
  }

  // Tensor-core kernels compute P = exp2(x * scale2 - maximum). Here x is the product.
  __device__ __forceinline__ T scale2() const { return T(log2e) * scale; }
  template <class... Tile>
  __device__ __forceinline__ void apply(const Tile&...) const {}
};

// Returns the score, or -infinity where the mask hides the key.
template <class T>
__device__ __forceinline__ T masked(T score, const Extent& extent, int row, int key) {
  return extent.sees(row, key) ? score : T(-infinity);
}

// Returns dS from P, dP - delta and the slope of the score modification.
template <class T>
__device__ __forceinline__ T score_gradient(T p, T dP_minus_delta, T) {
  return p * dP_minus_delta;
}
