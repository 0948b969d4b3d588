#pragma once
// TMA reduce-adds to global memory, and waits for TMA stores.
//
// The simulator reads shared memory for a store only when the thread waits for that store; it
// reports a write before the wait as a race. Floats are added later still: with a seed in a random
// wait, without a seed in bulk_wait_group or at the end of the block.
#include <ptx/proxy_fence.cuh>
#include <ptx/tma.cuh>

// Starts an atomic add of `count` floats, a multiple of 4, from shared to global memory. The order
// of additions is unspecified. Commits and waits treat it as a store.
inline void bulk_add(float* memory, const float* shared, int count, simulator::Here here = {}) {
  simulator_add_floats(memory, shared, count, here.file, here.line);
}

// Commits this thread's stores as a group.
inline void bulk_commit_group() {
  simulator_commit_stores();
}

// Waits until this thread's stores have read shared memory.
inline void bulk_wait_group_read(simulator::Here here = {}) {
  const timeline::Phase waiting(timeline::store_wait);
  simulator_end_stores(here.file, here.line);
}

// Waits until this thread's stores are complete and visible to it.
inline void bulk_wait_group(simulator::Here here = {}) {
  const timeline::Phase waiting(timeline::store_wait);
  simulator_end_stores(here.file, here.line);
  simulator_make_additions();
}
