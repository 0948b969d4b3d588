#pragma once
// Copies of contiguous bytes by the tensor memory accelerator.
#include <ptx/tma.cuh>

// Starts to copy `bytes` bytes, a multiple of 16, between 16-byte aligned addresses. They count at
// the barrier.
// cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
__device__ __forceinline__ void bulk_load(void* shared, const void* memory, int bytes,
                                          Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(memory), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
