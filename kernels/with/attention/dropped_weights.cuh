#pragma once
// Applies dropout to weights and to dS.

#include <attention/score.cuh>

// Marks dropped weights in PS, P times the derivative of the score modification (dropout.cuh),
// because dP needs the same decisions later. `row` and `key` are the lane's first row and key.
template <class Weights, class Place>
__device__ __forceinline__ void mark(Weights& PS, const Place& extent, int row, int key) {
  if constexpr (has_dropout) mark_weights(PS, extent, row, key);
}
// Zeroes P where the mark in PS says that the weight is dropped.
template <class Weights>
__device__ __forceinline__ void drop_marked(Weights& P, const Weights& PS) {
  if constexpr (has_dropout) drop_unmarked(P, PS);
}
// Returns dS of a pair, without the scale; `factor` is the extent's kept_factor().
template <class T>
__device__ __forceinline__ T weighted_gradient(T PS, T dP, T delta, [[maybe_unused]] T factor) {
  if constexpr (has_dropout) {
    const T gradient = (is_kept(PS) ? dP : T(0)) * factor - delta;
    return unmarked(PS) * gradient;
  }
  return PS * (dP - delta);
}
