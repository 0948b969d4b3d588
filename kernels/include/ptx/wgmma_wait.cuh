#pragma once
// Waits without reading D; operands of completed groups may then be overwritten.
// PTX: wgmma.wait_group
#include <ptx/wgmma.cuh>

template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
  const timeline::Phase waiting(timeline::product_wait, pending);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
