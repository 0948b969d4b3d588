#pragma once
// The end of a block of wgmma_columns or wgmma_columns_wide: the block stores dK and dV of its key
// tile, and a later launch converts dQ. The host replaces this header where the last block of a key
// head converts dQ (kernels/finishing) and where blocks share a group of query heads
// (kernels/sharing).

#include <backward/parts/group_shares.cuh>
#include <backward/parts/key_tile.cuh>
#include <backward/parts/repair_gradients.cuh>

template <class Part, int d, int dv>
struct BlockEnd {
  const Sizes& sizes;
  int kv_heads;
  const Part* dQ_sum;
  Part* key_sums;
  int* counts;

  // Ends task `number` of `all` in the warp that adds a warpgroup's parts of dQ.
  template <class Task>
  __device__ __forceinline__ void leave(const Part& part, int& was_last, const Task& task,
                                        int number, int all, int warpgroup) const {}
  // Returns whether dK and dV of task `number` of `all` are complete, so that the block stores
  // them.
  template <class Consumer, class Task>
  __device__ __forceinline__ bool completes(Consumer& consumer, const Task& task, int number,
                                            int all) const {
    return true;
  }
  // Ends a task in the consumers, after they have stored dK and dV.
  template <class Repair, int count>
  __device__ __forceinline__ void finish(const Repair& repair, Tensor<result> dQ,
                                         const int (&was_last)[count], int group) const {}
};
