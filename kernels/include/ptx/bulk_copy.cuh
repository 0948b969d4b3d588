#pragma once
// Starts a copy of `bytes` bytes from global to shared memory; the size and both addresses are
// multiples of 16. The copy signals `barrier` with the bytes transferred. The fence keeps it behind
// reads of `shared` by threads, which a barrier alone orders before other threads only.
// PTX: fence.proxy.async, cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
#include <ptx/tma.cuh>

__device__ __forceinline__ void bulk_load(void* shared, const void* memory, int bytes,
                                          Barrier& barrier) {
  asm volatile(
      "fence.proxy.async.shared::cta;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(memory), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
