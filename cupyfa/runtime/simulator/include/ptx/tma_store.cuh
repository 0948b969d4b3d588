#pragma once
// Starts a copy of a box from shared to global memory.
#include <ptx/bulk_store.cuh>

inline void tma_store(const TensorMap& map, const void* shared, int column, int row, int head,
                      int batch, simulator::Here here = {}) {
  const int coordinates[] = {column, row, head, batch};
  simulator_store_box(&map, shared, coordinates, here.file, here.line);
}
