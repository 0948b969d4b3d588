#pragma once
// Tests the mask of a pair by the distance of its key from its row.

#include <attention/extent.cuh>

// Like Extent::in_reach, but takes the distance key - row. The key must exist.
__device__ __forceinline__ bool sees_distance(const Extent& extent, int distance) {
  return (!causal || distance <= extent.causal_offset) &&
         (!windowed || distance >= extent.window_offset);
}
