#pragma once
// Copies by the tensor memory accelerator (TMA); one thread issues each copy.
//
// The host creates a tensor map. It describes an array [batch, heads, rows, columns] and a box:
// several rows of one head, 128 bytes of each. In shared memory a box starts at a multiple of 1024.
// Its 16-byte chunks are swizzled, so the same chunk of eight rows falls into different banks.
// Elements outside the array are read as zeros and never written.
#include <ptx/mbarrier.cuh>

struct alignas(64) TensorMap {
  unsigned long long words[16];
};

constexpr int box_columns = 64;  // for 16-bit numbers; 128 for 8-bit numbers
constexpr int box_row_bytes = 128;
constexpr int box_alignment = 1024;

// Starts a copy of a box to shared memory; the copy signals `barrier` with the bytes transferred.
// PTX: cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
__device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, Barrier& barrier,
                                         int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&barrier))
      : "memory");
}
