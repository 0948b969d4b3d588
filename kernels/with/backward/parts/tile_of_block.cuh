#pragma once
// The tile index that a block takes first. Blocks that share the query heads of a group take tiles
// of packed sequences longest first.

#include <attention/ragged_order.cuh>
#include <ptx/setmaxnreg.cuh>

// Returns -1 if the block's place in the order is unused. All lanes of a warp call this together.
template <int size, class Arrays>
__device__ __forceinline__ int tile_of_block(const Sizes& sizes, const Arrays& mods, int heads) {
  if constexpr (packed && shares_groups) {
    const RaggedOrder<size, true> order(sizes, mods, heads, 1);
    Place found;
    int index = -1;
    if (order.find(blockIdx.x, mods, found))
      index = found.head * tile_numbers<size, 1>(mods.cu_seqlens_k_, sizes.N) +
              order.first_tile(mods, found.batch) + found.tile;
    return warp_uniform(index);
  } else {
    return blockIdx.x;
  }
}
