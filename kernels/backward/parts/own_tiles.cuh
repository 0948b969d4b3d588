#pragma once
// The tiles of a block that stays on its multiprocessor, one in each round of all blocks.

#include <attention/extent.cuh>

// All tiles of keys, and how many a head has.
struct OwnTiles {
  int of_head, all;

  // The number of the tile that comes in a place. Under a causal mask the tiles of as many heads as
  // make two rounds are dealt out together, the longest first, then those of the next.
  __device__ __forceinline__ int in_place(int place) const {
    if constexpr (!causal) return place;
    const int together = max(1, 2 * int(gridDim.x) / of_head);
    const int first = place / (together * of_head), rest = place % (together * of_head);
    const int heads = min(together, all / of_head - first * together);
    return (first * together + rest % heads) * of_head + rest / heads;
  }

  // The block's place in a round. Under a causal mask every second round goes from the last block
  // to the first, so that all have about the same to do.
  __device__ __forceinline__ int place(int round) const {
    const int block = causal && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * int(gridDim.x) + block;
  }
  // How many tiles the block has, and the number of one.
  __device__ __forceinline__ int count() const {
    const int whole = all / int(gridDim.x);
    return whole + (place(whole) < all);
  }
  __device__ __forceinline__ int operator[](int i) const { return in_place(place(i)); }
};
