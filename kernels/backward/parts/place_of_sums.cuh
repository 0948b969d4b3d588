#pragma once
// Finds the row tile whose statistics a block computes.

#include <attention/batch.cuh>
#include <attention/tile_index.cuh>

// Returns the block's row tile. In ragged batches, sets M to the number of queries of its sequence.
template <int Br, class Arrays>
__device__ __forceinline__ Place place_of_sums(int& M, int heads,
                                               [[maybe_unused]] const Arrays& mods) {
  const Place found = place_of_rows<Br>(blockIdx.x, Sizes{M}, mods, heads);
  if constexpr (packed) {
    M = found.tile < 0 ? (-2147483647 - 1) : used_queries(mods, found.batch, M).count;
  } else if constexpr (ragged) {
    M = used_queries(mods, found.batch, M).count;
  }
  return found;
}
