#pragma once
// The block's dynamic shared memory, seen as one struct.

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  return *reinterpret_cast<Shared*>(dynamic_shared_memory);
}
