#pragma once
// The block's dynamic shared memory as one struct. The runtime allocates exactly the bytes that the
// launch requests, and checks every access.
#include <simulator.h>

template <class Shared>
__device__ SIMULATOR_INLINED Shared& shared_memory() {
  return *reinterpret_cast<Shared*>(simulator_shared_memory());
}
