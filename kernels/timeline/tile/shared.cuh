#pragma once
// The same as kernels/include/tile/shared.cuh, which it replaces in recorded launches: notes where
// shared memory begins.
#include <timeline.cuh>

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  timeline::begin_shared(dynamic_shared_memory);
  return *reinterpret_cast<Shared*>(dynamic_shared_memory);
}
