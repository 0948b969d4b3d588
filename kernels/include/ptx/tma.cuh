#pragma once
// Tiles that the tensor memory accelerator copies between global and shared memory: one thread
// asks for a tile, and no thread moves it.
//
// A tensor map, made by the host, describes an array [batch, heads, rows, columns] of 16-bit
// numbers and a box of it: so many rows of one head, 64 columns; or 128 columns of an array of
// 8-bit numbers. In shared memory a box is a Box, 128 bytes a row, at a multiple of 1024; its
// chunks of 16 bytes lie swizzled, so that eight rows' equal chunks fall into different banks. What
// lies outside the array is zero when read and is left out when written.
#include <ptx/mbarrier.cuh>

struct alignas(64) TensorMap {
  unsigned long long words[16];
};

constexpr int box_columns = 64;  // of 16 bits; 128 of 8
constexpr int box_row_bytes = 128;
constexpr int box_alignment = 1024;

// Begins to copy a box to shared memory; its bytes count at the barrier.
// cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
__device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, Barrier& barrier,
                                         int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&barrier))
      : "memory");
}
