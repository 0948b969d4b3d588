#pragma once
// Starts a copy of `bytes` bytes from global to shared memory; the size and both addresses are
// multiples of 16. The copy signals `barrier` with the bytes transferred. The fence keeps it behind
// reads of `shared` by threads, which a barrier alone orders before other threads only.
#include <ptx/tma.cuh>

inline void bulk_load(void* shared, const void* memory, int bytes, Barrier& barrier,
                      simulator::Here here = {}) {
  simulator_fence_for_copies();
  simulator_load_bytes(shared, memory, bytes, &barrier, here.file, here.line);
}
