#pragma once
// Finds the last of several blocks that add to the same sums in global memory.

#include <backward/parts/add_dQ.cuh>

// Returns whether this is the last of `all` calls. The last caller sees all earlier writes.
__device__ __forceinline__ bool is_last(int& count, int all) {
  __threadfence();
  const bool last = atomicAdd(&count, 1) == all - 1;
  __threadfence();
  return last;
}

// Ends a warp that adds dQ: waits for its reduce-adds and records whether the warp is the last one.
__device__ __forceinline__ void leave_sums(int& was_last, int& count, int all) {
  if (elect_one()) {
    bulk_wait_group();
    wait_for_launch_before();  // the previous launch clears the count
    was_last = is_last(count, all);
  }
  __syncwarp();
  barrier_arrive(sums_left, leaving_threads);
}
