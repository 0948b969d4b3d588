#pragma once
// Starts a copy of `bytes` bytes from global to shared memory; the size and both addresses are
// multiples of 16. The copy signals `barrier` with the bytes transferred. The fence orders it
// after reads of `shared` by threads: a barrier alone does not, as TMA uses another proxy.
#include <ptx/tma.cuh>

inline void bulk_load(void* shared, const void* memory, int bytes, Barrier& barrier,
                      simulator::Here here = {}) {
  simulator_fence_for_copies();
  simulator_load_bytes(shared, memory, bytes, &barrier, here.file, here.line);
}
