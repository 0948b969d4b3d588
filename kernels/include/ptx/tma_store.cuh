#pragma once
// Starts a copy of a box from shared to global memory.
// PTX: cp.async.bulk.tensor.4d.global.shared::cta.tile
#include <ptx/bulk_store.cuh>

__device__ __forceinline__ void tma_store(const TensorMap& map, const void* shared, int column,
                                          int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
