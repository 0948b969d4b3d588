#pragma once
// Copies by the tensor memory accelerator (TMA); one thread issues each copy.
//
// The simulator copies a box only when a thread waits for the phase of its barrier; reading the box
// before that wait is reported as a race.
#include <ptx/mbarrier.cuh>

// Describes an array [batch, heads, rows, columns] of 16-bit or 8-bit numbers, and a box of it. A
// device keeps the 128 bytes opaque; the simulator uses this layout.
struct alignas(64) TensorMap {
  unsigned long long address;
  long long row_stride, head_stride, batch_stride;  // bytes
  int columns, rows, heads, batch, box_rows;
  int itemsize;    // bytes
  int unused[18];  // zeros
};
static_assert(sizeof(TensorMap) == 128, "as large as on a device");

constexpr int box_columns = 64;  // for 16-bit numbers; 128 for 8-bit numbers
constexpr int box_row_bytes = 128;
constexpr int box_alignment = 1024;

// Starts a copy of a box to shared memory; the copy signals `barrier` with the bytes transferred.
inline void tma_load(void* shared, const TensorMap& map, Barrier& barrier, int column, int row,
                     int head, int batch, simulator::Here here = {}) {
  const int coordinates[] = {column, row, head, batch};
  simulator_load_box(shared, &map, &barrier, coordinates, here.file, here.line);
}
