#pragma once
// The end of a block of wgmma_columns: it stores dK and dV of its key tile, and a later launch
// converts dQ. The host replaces this header where the last block of a key head converts dQ
// (kernels/finishing) and where blocks share a group of query heads (kernels/sharing).

#include <backward/parts/key_tile.cuh>
#include <backward/parts/repair_gradients.cuh>

template <class Part, int d, int dv>
struct BlockEnd {
  const Sizes& sizes;
  int kv_heads;
  const Part* dQ_sum;
  Part* key_sums;
  int* counts;

  // Returns how many blocks share a group.
  static constexpr int splits(int) { return 1; }
  // Ends the additions of a warp that adds dQ of a key tile.
  template <class Task>
  __device__ __forceinline__ void leave(const Part&, int&, const Task&, int, int, int) const {}
  // Returns whether dK and dV are complete, so that this block stores them.
  template <class Consumer, class Task>
  __device__ __forceinline__ bool completes(Consumer&, const Task&, int, int) const {
    return true;
  }
  // Ends a key tile in the consumers.
  template <class Repair, int count>
  __device__ __forceinline__ void finish(const Repair&, Tensor<result>, const int (&)[count],
                                         int) const {}
};
