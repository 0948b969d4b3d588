#pragma once
// Copies by the tensor memory accelerator (TMA), which one thread starts.
//
// A box is loaded in the first wait for its barrier's phase; an earlier use is reported as a race.
#include <ptx/mbarrier.cuh>

// An array [batch, heads, rows, columns] of numbers of 16 bits, or of 8, and a box of it. On a
// device only the driver knows the layout of its 128 bytes; here it is this one.
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

// Starts to copy a box to shared memory; the barrier counts its bytes.
inline void tma_load(void* shared, const TensorMap& map, Barrier& barrier, int column, int row,
                     int head, int batch, simulator::Here here = {}) {
  const int coordinates[] = {column, row, head, batch};
  simulator_load_box(shared, &map, &barrier, coordinates, here.file, here.line);
}
