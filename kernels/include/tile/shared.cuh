#pragma once
// Returns the block's dynamic shared memory as one struct, aligned to 1024 bytes for TMA's swizzle.
#include <timeline.cuh>

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  timeline::begin_shared(dynamic_shared_memory);
  return *reinterpret_cast<Shared*>(dynamic_shared_memory);
}
