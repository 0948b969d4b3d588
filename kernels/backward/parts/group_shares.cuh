#pragma once
// A block processes a whole group of query heads. Where blocks share one, the host replaces this
// header (kernels/sharing). The last `summing_threads` threads hold KeySums of dK, ValueSums of dV.

__device__ constexpr int blocks_of_group(int splits) {
  return 1;
}

template <class KeySums, class ValueSums, int summing_threads>
struct GroupShares {
  real* sums;
  int *counts, splits, stride;

  // Returns whether a warp's dK and dV are complete, so that the warp stores them.
  __device__ static constexpr bool complete(KeySums&, ValueSums&, int) { return true; }
};
