#pragma once
// Applies dropout to weights and to dS.

#include <attention/score.cuh>

// dP must know which weights are dropped, but is computed after them. So PS, P times the slope of
// the modification, is marked (dropout.cuh). row and key are the first of the lane's.
template <class Weights, class Place>
__device__ __forceinline__ void mark(Weights& PS, const Place& extent, int row, int key) {
  if constexpr (has_dropout) mark_weights(PS, extent, row, key);
}
// Sets P of marked weights to 0 where they are dropped.
template <class Weights>
__device__ __forceinline__ void drop_marked(Weights& P, const Weights& PS) {
  if constexpr (has_dropout) drop_unmarked(P, PS);
}
// dS of a pair, without the scale; `factor` is the extent's kept_factor().
template <class T>
__device__ __forceinline__ T weighted_gradient(T PS, T dP, T delta, [[maybe_unused]] T factor) {
  if constexpr (has_dropout) {
    const T gradient = (is_kept(PS) ? dP : T(0)) * factor - delta;
    return unmarked(PS) * gradient;
  }
  return PS * (dP - delta);
}
