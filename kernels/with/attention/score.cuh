#pragma once
// Converts products q·k to scores, and computes their derivatives, for all forward and backward
// kernels. Without modifications the score is the scaled product.
//
//   score = scale * q·k  ->  softcap, score_mod, ALiBi and bias, one after the other
//                        ->  -infinity where the mask hides the key
//
// In the source above a kernel, the host defines the options listed in score_context.cuh, and
// positive_scale: true if the scale is known to be positive. A Scorer holds its own copy of Mods;
// the compiler elides the copy if the kernel's argument is a __grid_constant__.

#include <attention/no_bias.cuh>
#include <attention/extent.cuh>
#include <attention/tile_pair.cuh>

// Defined in score_mod.cuh, which the host includes for expressions.
template <bool hides, class Scorer, class T, int m, int n, class Rows, class Bias>
__device__ __forceinline__ void apply_expressions(const Scorer& scorer, T (&products)[m][n][4],
                                                  const Rows& rows, int first_key,
                                                  const Bias& bias);

template <class T>
struct Scorer {
  T scale;
  Mods mods;

  // Returns the score of one product, -infinity where a mask expression hides the pair.
  __device__ __forceinline__ T operator()(T product, const Extent& extent, int row, int key) const {
    const T score = modified(product, extent, index_of<true>(row, 0, extent.M),
                             index_of<true>(key, 0, extent.N));
    return extent.shown(row, key) ? score : T(-infinity);
  }
  // Returns the score in kernels whose expressions do not depend on the pair's position.
  __device__ __forceinline__ T operator()(T product) const {
    HeadContext<has_score_mod> nowhere;
    nowhere.take(0, 0, 0, 0, mods);
    return nowhere.modified(product * scale, 0, 0, 0);
  }
  template <bool is_capped = false, class Key>
  __device__ __forceinline__ Scored<T> with_slope(T product, const Extent& extent, Index row,
                                                  Key key) const {
    if constexpr (of_products) return {modified(product, extent, row, key), T(1)};
    return extent.template with_slope<is_capped>(is_capped ? product : product * scale, row, key);
  }
  template <class Key>
  __device__ __forceinline__ T modified(T product, const Extent& extent, Index row, Key key) const {
    return extent.template modified<of_products>(product * scale, row, key, 0);
  }
  // Returns the score as an exponent of two, and its slope. is_capped: cap() has been applied.
  template <bool is_capped = false, class Key>
  __device__ __forceinline__ Scored<T> exponent_with_slope(T product, const Extent& extent,
                                                           Index row, Key key) const {
    if constexpr (!has_score_mod) return {product * (scale * T(log2e)), T(1)};
    if constexpr (of_products)
      return {extent.modified(product, row, key, 0) * (scale * T(log2e)), T(1)};
    const auto [score, slope] = with_slope<is_capped>(product, extent, row, key);
    return {score * T(log2e), slope};
  }

  // Returns exponent and slope for a pair of a row tile and a key tile; key + more may exceed N.
  template <bool at_end, int rows, int keys>
  __device__ __forceinline__ Scored<T> exponent_with_slope(T product,
                                                           const TilePair<rows, keys>& pair,
                                                           int row, int key, int more) const {
    return exponent_with_slope<caps_tiles>(product, pair.extent, pair.row(row),
                                           pair.template key<at_end>(key, more));
  }

  // Tensor-core kernels compute P = exp2(x * scale2 - maximum), with x from applied().
  //  - Without a modification x is the product, and scale2 = |scale| * log2e. A negative scale
  //    flips the sign of x, so that the largest x belongs to the largest score.
  //  - With a modification x is the modified score, and scale2 = log2e. For expressions of
  //    products x is the modified product, and scale2 includes the scale.
  // If the scale is 0, x is 0 but scale2 is not: -infinity * 0, for a masked key, would be NaN.
  __device__ __forceinline__ T scale2() const {
    return T(log2e) * (has_score_mod    ? (of_products ? scale : T(1))
                       : positive_scale ? scale
                       : scale == 0     ? T(1)
                                        : fabs(scale));
  }
  // Returns the x of scale2() for a product. is_capped: the product has the softcap applied.
  template <bool is_capped = false, class Key>
  __device__ __forceinline__ T applied(T product, const Extent& extent, Index row, Key key,
                                       int more = 0) const {
    if constexpr (has_score_mod)
      return extent.template modified<is_capped>(
          of_products || is_capped ? product : product * scale, row, key, more);
    return positive_scale ? product : product * T((scale > 0) - (scale < 0));
  }
  // Calls applied() on the lane's products in a key tile; is_full: the mask hides no pair.
  template <int m, int n, class Rows, class Bias = NoBias>
  __device__ __forceinline__ void apply(T (&products)[m][n][4], const Rows& rows, int first_key,
                                        [[maybe_unused]] bool is_full = false,
                                        [[maybe_unused]] const Bias& bias = {}) const {
    if constexpr (has_key_tiles) {
      if (!is_full)
        apply_expressions<true>(*this, products, rows, first_key, bias);
      else if constexpr (has_score_mod || !positive_scale)
        apply_expressions<false>(*this, products, rows, first_key, bias);
    } else if constexpr (has_expressions) {
      apply_expressions<true>(*this, products, rows, first_key, bias);
    } else if constexpr (!positive_scale) {
#pragma unroll
      for (int i = 0; i < m * n * 4; ++i) {
        T& x = products[i / (4 * n)][i / 4 % n][i % 4];
        x *= T((scale > 0) - (scale < 0));
      }
    }
  }
};

// Returns the score, or -infinity where the mask hides the key.
template <class T>
__device__ __forceinline__ T masked(T score, const Extent& extent, int row, int key) {
  return extent.sees(row, key) ? score : T(-infinity);
}

// Returns dS from P, dP - delta and the slope of the score modification: 0 where P is 0, because
// the slope may be infinite there.
template <class T>
__device__ __forceinline__ T score_gradient(T p, T dP_minus_delta, [[maybe_unused]] T slope) {
  if constexpr (unit_slope) return p * dP_minus_delta;
  return p == 0 ? T(0) : p * dP_minus_delta * slope;
}
