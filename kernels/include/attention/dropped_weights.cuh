#pragma once
// Applies dropout to weights and dS: a no-op here. With dropout the host replaces this header by
// kernels/with/attention/dropped_weights.cuh.

#include <attention/score.cuh>

template <class Weights, class Place>
__device__ __forceinline__ void mark(Weights&, const Place&, int, int) {}
template <class Weights>
__device__ __forceinline__ void drop_marked(Weights&, const Weights&) {}

// Returns dS of a pair, without the scale.
template <class T>
__device__ __forceinline__ T weighted_gradient(T P, T dP, T delta, T) {
  return P * (dP - delta);
}
