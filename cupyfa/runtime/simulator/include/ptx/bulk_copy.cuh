#pragma once
// Copies contiguous bytes with the tensor memory accelerator (TMA).
#include <ptx/tma.cuh>

// Starts a copy of `bytes` bytes from global to shared memory; the size and both addresses are
// multiples of 16. The copy signals `barrier` with the bytes transferred.
inline void bulk_load(void* shared, const void* memory, int bytes, Barrier& barrier,
                      simulator::Here here = {}) {
  simulator_load_bytes(shared, memory, bytes, &barrier, here.file, here.line);
}
