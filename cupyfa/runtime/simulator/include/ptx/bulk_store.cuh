#pragma once
// Additions of the tensor memory accelerator to global memory, and waits for its stores.
//
// A store reads shared memory in the wait for it; a write before that is reported as a race. Floats
// are added later: with a seed in any such wait, without one in bulk_wait_group or at the block's
// end.
#include <ptx/tma.cuh>

// Starts to add `count` floats, a multiple of 4, to floats in global memory, each atomically, in
// any order. It counts as a store.
inline void bulk_add(float* memory, const float* shared, int count, simulator::Here here = {}) {
  simulator_add_floats(memory, shared, count, here.file, here.line);
}

// Ends a group of this thread's stores.
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

// Makes this thread's writes to shared memory visible to copies and tensor cores; after a barrier
// another thread may start these.
inline void fence_proxy_async() {
  simulator_fence_for_copies();
}
