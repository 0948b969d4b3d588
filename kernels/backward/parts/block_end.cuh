#pragma once
// The end of a block of wgmma_columns or wgmma_columns_wide: a later launch converts dQ. The host
// replaces this header where the last block of a key head converts dQ (kernels/finishing).

#include <backward/parts/key_tile.cuh>
#include <backward/parts/repair_gradients.cuh>

template <class Part, int d, int dv>
struct BlockEnd {
  const Sizes& sizes;
  int kv_heads;
  const Part* dQ_sum;
  int* counts;

  // Ends a task in the warp that adds a warpgroup's parts of dQ.
  template <class Task>
  __device__ __forceinline__ void leave(int& was_last, const Task& task) const {}
  // Ends a task in the consumers, after they have stored dK and dV.
  template <class Repair, int count>
  __device__ __forceinline__ void finish(const Repair& repair, Tensor<result> dQ,
                                         const int (&was_last)[count], int group) const {}
};
