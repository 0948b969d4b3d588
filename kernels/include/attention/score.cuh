#pragma once
// From a product of Q and K to the score that the softmax takes, and the derivative of that step.
// Every kernel, forward and backward, asks here. Without modifications only the scale remains.
//
//   score = scale * q·k  ->  softcap * tanh(score / softcap)  ->  -infinity where it is masked
//
// The host writes above a kernel's text: has_softcap and positive_scale (whether the scale is known
// to be above 0), and struct Mods, whose members are the numbers that modifications need. Where an
// argument is __grid_constant__, the compiler makes no copy of it.

#include <attention/extent.cuh>

constexpr bool has_score_mod = has_softcap;

// A score and d score / d (scale * q·k).
template <class T>
struct Scored {
  T score, slope;
};

// cap * tanh(score / cap), with an absolute error of a few units in the last place of cap in float:
// 1 - 2 / (1 + exp(2 * x)) takes fewer instructions than tanhf. Where exp overflows, 2 / infinity
// is 0, and the result is cap.
template <class T, class Mods>
__device__ __forceinline__ Scored<T> capped(T score, const Mods& mods) {
  const T cap = mods.softcap, x = score / cap;
  T tanh_x;
  if constexpr (sizeof(T) == 8)
    tanh_x = tanh(x);
  else
    tanh_x = 1 - __fdividef(2, 1 + exp2f(x * (2 * log2e)));
  return {cap * tanh_x, 1 - tanh_x * tanh_x};
}

template <class T>
struct Scorer {
  T scale;
  Mods mods;

  // The modified score of a scaled product, in natural units.
  __device__ __forceinline__ Scored<T> modified(T score) const {
    if constexpr (has_softcap) return capped(score, mods);
    return {score, T(1)};
  }

  // Kernels that compute scores one by one take them from here.
  __device__ __forceinline__ T operator()(T product) const {
    return modified(product * scale).score;
  }
  __device__ __forceinline__ Scored<T> with_slope(T product) const {
    return modified(product * scale);
  }
  // The same with the score as an exponent of two.
  __device__ __forceinline__ Scored<T> exponent_with_slope(T product) const {
    if constexpr (!has_score_mod) return {product * (scale * T(log2e)), T(1)};
    const auto [score, slope] = with_slope(product);
    return {score * T(log2e), slope};
  }

  // Kernels on tensor cores compute P = exp2(x * scale2 - maximum), with x from applied().
  //  - Without a modification x is the product, and scale2 = |scale| * log2e. A negative scale
  //    turns the sign of x, so that the largest x is that of the largest score.
  //  - With one x is the modified score, and scale2 = log2e.
  // If the scale is 0, x is 0, and scale2 is not: -infinity * 0, of a masked key, would be NaN.
  // That a scale is positive, as usual, is a constant: with a branch in the loop wgmma_persistent
  // is up to 2 % slower.
  __device__ __forceinline__ T scale2() const {
    return T(log2e) * (has_score_mod    ? T(1)
                       : positive_scale ? scale
                       : scale == 0     ? T(1)
                                        : fabs(scale));
  }
  __device__ __forceinline__ T applied(T product) const {
    if constexpr (has_score_mod) return modified(product * scale).score;
    return positive_scale ? product : product * T((scale > 0) - (scale < 0));
  }
  template <int m, int n>
  __device__ __forceinline__ void apply(T (&products)[m][n][4]) const {
    if constexpr (has_score_mod || !positive_scale) {
#pragma unroll
      for (int i = 0; i < m * n * 4; ++i) {
        T& x = products[i / (4 * n)][i / 4 % n][i % 4];
        x = applied(x);
      }
    }
  }
};

// A score, or -infinity where the mask hides the key.
template <class T>
__device__ __forceinline__ T masked(T score, const Extent& extent, int row, int key) {
  return extent.sees(row, key) ? score : T(-infinity);
}

// dS of a score, from P, dP - delta and the slope of the modification: 0 where P is 0, because a
// slope may be infinite there.
template <class T>
__device__ __forceinline__ T score_gradient(T p, T dP_minus_delta, [[maybe_unused]] T slope) {
  if constexpr (!has_score_mod) return p * dP_minus_delta;
  return p == 0 ? T(0) : p * dP_minus_delta * slope;
}
