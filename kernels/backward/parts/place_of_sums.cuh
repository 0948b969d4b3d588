#pragma once
// The tile of rows that a block sums up.

#include <attention/ragged.cuh>
#include <tile/tensor.cuh>

// The tile of a block. M becomes the rows of its batch element, if launches go by lengths.
template <int Br, class Arrays>
__device__ __forceinline__ Place place_of_sums(int& M, int heads,
                                               [[maybe_unused]] const Arrays& mods) {
  if constexpr (packed) {
    const Place found = ragged_place<Br, 1>(blockIdx.x, mods.cu_seqlens_q_, M, heads);
    M = found.tile < 0 ? (-2147483647 - 1) : used_queries(mods, found.batch, M).count;
    return found;
  } else {
    const Place found = place(blockIdx.x, cdiv(M, Br), heads);
    if constexpr (ragged) M = used_queries(mods, found.batch, M).count;
    return found;
  }
}
