#pragma once
// Starts a copy of `bytes` bytes from global to shared memory; the size and both addresses are
// multiples of 16. The copy signals `barrier` with the bytes transferred.
// PTX: cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
#include <ptx/tma.cuh>

__device__ __forceinline__ void bulk_load(void* shared, const void* memory, int bytes,
                                          Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(memory), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
