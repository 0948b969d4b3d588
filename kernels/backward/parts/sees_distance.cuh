#pragma once
// The mask of a pair, as a function of the distance between key and row.

#include <attention/extent.cuh>

// Like Extent::in_reach, but takes the distance key - row. The key must exist.
__device__ __forceinline__ bool sees_distance(const Extent& extent, int distance) {
  return (!causal || distance <= extent.causal_offset) &&
         (!windowed || distance >= extent.window_offset);
}
