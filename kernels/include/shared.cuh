#pragma once
// The block's dynamic shared memory, seen as one struct.

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
  return *reinterpret_cast<Shared*>(dynamic_shared_memory);
}

// The address of something in shared memory as instructions on shared memory take it.
__device__ __forceinline__ unsigned shared_address(const void* object) {
  return static_cast<unsigned>(__cvta_generic_to_shared(object));
}
