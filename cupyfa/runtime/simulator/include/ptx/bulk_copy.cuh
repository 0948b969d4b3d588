#pragma once
// Copies of the tensor memory accelerator other than loads of boxes: bytes as they lie, and stores.
//
// What is stored is read in the wait for that; who writes it before is in a race, and is reported.
// Floats are added later still: by a seed at any such wait or, as without one, in bulk_wait_group
// or when the block ends.
#include <ptx/tma.cuh>

// Begins to copy `bytes` bytes, a multiple of 16, between multiples of 16. They count at the
// barrier.
inline void bulk_load(void* shared, const void* memory, int bytes, Barrier& barrier,
                      simulator::Here here = {}) {
  simulator_load_bytes(shared, memory, bytes, &barrier, here.file, here.line);
}

// Begins to copy a box from shared memory.
inline void tma_store(const TensorMap& map, const void* shared, int column, int row, int head,
                      int batch, simulator::Here here = {}) {
  const int coordinates[] = {column, row, head, batch};
  simulator_store_box(&map, shared, coordinates, here.file, here.line);
}

// Begins to add floats in shared memory, a multiple of 4 of them, to such in global memory: each is
// added in one step, in any order. It counts as a store.
inline void bulk_add(float* memory, const float* shared, int count, simulator::Here here = {}) {
  simulator_add_floats(memory, shared, count, here.file, here.line);
}

// Ends a group of this thread's stores.
inline void bulk_commit_group() {
  simulator_commit_stores();
}

// Waits until this thread's stores have read shared memory.
inline void bulk_wait_group_read(simulator::Here here = {}) {
  simulator_end_stores(here.file, here.line);
}

// Waits until this thread's stores have arrived, and it sees what they did.
inline void bulk_wait_group(simulator::Here here = {}) {
  simulator_end_stores(here.file, here.line);
  simulator_make_additions();
}

// Lets copies and tensor cores see what this thread has written to shared memory; a barrier then
// lets another thread begin them.
inline void fence_proxy_async() {
  simulator_publish_to_copies();
}
