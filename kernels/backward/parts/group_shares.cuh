#pragma once
// A block processes a whole group of query heads. Where blocks share a group, the host replaces
// this header (kernels/sharing). The last `summing_threads` threads hold KeySums of dK, ValueSums
// of dV.

template <class KeySums, class ValueSums, int summing_threads>
struct GroupShares {
  real* sums;
  int *counts, splits, stride;

  // Returns how many blocks share a group.
  __device__ static constexpr int count() { return 1; }
  // Returns whether a warp's dK and dV are complete, so that the warp stores them.
  __device__ static constexpr bool complete(KeySums&, ValueSums&, int) { return true; }
};
