#pragma once
// Tiles that the tensor memory accelerator copies between global and shared memory: one thread
// asks for a tile, and no thread moves it.
//
// A box is loaded in the first wait for its barrier's phase, and read to be stored in the wait for
// that. Who uses its bytes before is in a race, and is reported. Floats are added later still: by a
// seed at any such wait or, as without one, in bulk_wait_group or when the block ends.
#include <ptx/mbarrier.cuh>

// An array [batch, heads, rows, columns] of numbers of 16 bits, or of 8, and a box of it. On a
// device its 128 bytes are the driver's secret; here they are these.
struct alignas(64) TensorMap {
  unsigned long long address;
  long long row_stride, head_stride, batch_stride;  // bytes
  int columns, rows, heads, batch, box_rows;
  int itemsize;    // bytes
  int unused[18];  // zeros
};
static_assert(sizeof(TensorMap) == 128, "as large as on a device");

constexpr int box_columns = 64;  // of 16 bits; 128 of 8
constexpr int box_row_bytes = 128;
constexpr int box_alignment = 1024;

// Begins to copy a box to shared memory; its bytes count at the barrier.
inline void tma_load(void* shared, const TensorMap& map, Barrier& barrier, int column, int row,
                     int head, int batch, simulator::Here here = {}) {
  const int coordinates[] = {column, row, head, batch};
  simulator_load_box(shared, &map, &barrier, coordinates, here.file, here.line);
}

// Begins to copy so many bytes as they lie, from one multiple of 16 to another, and a multiple of
// 16 themselves; they count at the barrier.
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
