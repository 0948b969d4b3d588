#pragma once
// Copies by the tensor memory accelerator (TMA), which one thread starts.
//
// A tensor map, made by the host, describes an array [batch, heads, rows, columns] and the size of
// a box: some rows of one head, 128 bytes of each. In shared memory a box begins at a multiple of
// 1024. Its chunks of 16 bytes are swizzled: the same chunk of eight rows lies in different banks.
// Elements outside the array are read as zero, and not written.
#include <ptx/mbarrier.cuh>

struct alignas(64) TensorMap {
  unsigned long long words[16];
};

constexpr int box_columns = 64;  // of 16 bits; 128 of 8
constexpr int box_row_bytes = 128;
constexpr int box_alignment = 1024;

// Starts to copy a box to shared memory; its bytes count at the barrier.
// cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
__device__ __forceinline__ void tma_load(void* shared, const TensorMap& map, Barrier& barrier,
                                         int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&barrier))
      : "memory");
}
