#pragma once
// The block's dynamic shared memory, seen as one struct.
//
// The runtime keeps exactly as many bytes as the launch asked for, and checks every access.
#include <simulator.h>

template <class Shared>
__device__ SIMULATOR_INLINED Shared& shared_memory() {
  return *reinterpret_cast<Shared*>(simulator_shared_memory());
}
