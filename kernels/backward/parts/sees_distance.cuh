#pragma once
// The mask of a pair by the distance of the key from the row.

#include <attention/extent.cuh>

// Like Extent::in_reach, for a key that exists at this distance from the row.
__device__ __forceinline__ bool sees_distance(const Extent& extent, int distance) {
  return (!causal || distance <= extent.causal_offset) &&
         (!windowed || distance >= extent.window_offset);
}
