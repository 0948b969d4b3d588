#pragma once
// The mask of a pair by the distance of the key from the row.

#include <attention/extent.cuh>

// Extent::in_reach for a key that exists, by its distance from the row's number.
__device__ __forceinline__ bool sees_distance(const Extent& extent, int distance) {
  return (!causal || distance <= extent.causal_offset) &&
         (!windowed || distance >= extent.window_offset);
}
