#pragma once
// Starts a copy of `bytes` bytes from global to shared memory; the size and both addresses are
// multiples of 16. The copy signals `barrier` with the bytes transferred. The fence orders it
// after reads of `shared` by threads: a barrier alone does not, as TMA uses another proxy.
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
