#pragma once
// Tangents of arrays that change scores: a bias, slopes, captured arrays and sinks.
//
// The host defines moves_arrays. If it is true, the host includes this header above the kernel and
// generates struct Tangents, whose members are the tangents [directions, axes of the array], and a
// score_mod on DirectionTape, which differentiates the expressions along a direction.

#include <attention/score.cuh>

template <int n>
struct Dual;  // expression.cuh, which the host includes for expressions
struct Tangents;

// Reads elements of arrays together with their tangents in one direction. A Number has two
// derivatives: with respect to the score, and along the direction.
template <class Arrays, int derivatives = 2>
struct DirectionTape {
  using Number = Dual<derivatives>;
  const Arrays& arrays;
  int direction;

  template <int array, class Array, class... Indices>
  __device__ __forceinline__ Number read(const Array& from, const Indices&... indices) const {
    Number x = number(from.read(indices...));
    x.slope[1] = arrays.template of<array>().read(direction, indices...).value;
    return x;
  }
};

// The tangents as an argument of a kernel. For each pair the kernel keeps a factor of the
// derivative of its product q·k, here P times the slope of the expressions.
template <bool moves, class Arrays = Tangents>
struct ArrayTangents {
  __device__ real of_sink(int, int, int, real) const { return 0; }
  __device__ real kept(real p, real slope) const { return score_gradient(p, slope, real(1)); }
  __device__ real moved(const Extent&, int, int, int, real kept, const real&,
                        real product_dot) const {
    return kept == 0 ? real(0) : kept * product_dot;
  }
};

template <class Arrays>
struct ArrayTangents<true, Arrays> {
  Arrays arrays;

  // Returns the derivative of a row's sum of weights relative to its sink; without a sink, 0.
  __device__ real of_sink(int direction, int batch, int head, real sink) const {
    return sink == -infinity ? real(0) : arrays.of_sink(direction, batch, head);
  }
  __device__ real kept(real p, real) const { return p; }
  // Returns P S_dot from P, the scaled product q·k and its derivative along the direction.
  template <class Extent>
  __device__ real moved(const Extent& extent, int direction, int row, int key, real p,
                        const real& product, real product_dot) const {
    using Tape = DirectionTape<Arrays>;
    const Tape tape = {arrays, direction};
    typename Tape::Number score(product);
    score.slope[0] = 1;
    const auto x = score_mod(score, tape, extent.mods, extent.batch, extent.head,
                             index_of<true>(row, 0, extent.M), index_of<true>(key, 0, extent.N),
                             extent.queries, extent.keys);
    if (p == 0) return 0;
    const real slope = p * x.slope[0];
    return (slope == 0 ? real(0) : slope * product_dot) + p * x.slope[1];
  }
};
