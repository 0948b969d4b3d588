#pragma once
// Starts a copy of `bytes` bytes from global to shared memory; the size and both addresses are
// multiples of 16. The copy signals `barrier` with the bytes transferred.
#include <ptx/tma.cuh>

inline void bulk_load(void* shared, const void* memory, int bytes, Barrier& barrier,
                      simulator::Here here = {}) {
  simulator_load_bytes(shared, memory, bytes, &barrier, here.file, here.line);
}
