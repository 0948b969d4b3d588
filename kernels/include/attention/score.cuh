#pragma once
// Turns a product of Q and K into the score that the softmax takes, and differentiates that step:
// here by a positive scale. Where scores are modified or masked by expressions, or the scale may
// not be positive, the host puts kernels/with/attention/score.cuh in place of this header.

#include <attention/extent.cuh>

template <class T>
struct Scorer {
  T scale;
  Mods mods;

  // The score of one product, wherever the pair is.
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
  // The score as an exponent of two, and its slope.
  template <bool = false, class... Pair>
  __device__ __forceinline__ Scored<T> exponent_with_slope(T product, const Pair&...) const {
    return {product * (scale * T(log2e)), T(1)};
  }

  // Kernels on tensor cores compute P = exp2(x * scale2 - maximum). Here x is the product.
  __device__ __forceinline__ T scale2() const { return T(log2e) * scale; }
  template <class... Tile>
  __device__ __forceinline__ void apply(const Tile&...) const {}
};

// A score, or -infinity where the mask hides the key.
template <class T>
__device__ __forceinline__ T masked(T score, const Extent& extent, int row, int key) {
  return extent.sees(row, key) ? score : T(-infinity);
}

// dS of a score, from P, dP - delta and the slope of the modification.
template <class T>
__device__ __forceinline__ T score_gradient(T p, T dP_minus_delta, T) {
  return p * dP_minus_delta;
}
