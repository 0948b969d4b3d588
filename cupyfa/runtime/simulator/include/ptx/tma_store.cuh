#pragma once
// Stores of boxes by the tensor memory accelerator.
#include <ptx/bulk_store.cuh>

// Starts to copy a box from shared memory.
inline void tma_store(const TensorMap& map, const void* shared, int column, int row, int head,
                      int batch, simulator::Here here = {}) {
  const int coordinates[] = {column, row, head, batch};
  simulator_store_box(&map, shared, coordinates, here.file, here.line);
}
