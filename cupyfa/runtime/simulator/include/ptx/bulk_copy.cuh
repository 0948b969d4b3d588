#pragma once
// Copies of the tensor memory accelerator of bytes as they lie.
#include <ptx/tma.cuh>

// Starts to copy `bytes` bytes, a multiple of 16, between multiples of 16. They count at the
// barrier.
inline void bulk_load(void* shared, const void* memory, int bytes, Barrier& barrier,
                      simulator::Here here = {}) {
  simulator_load_bytes(shared, memory, bytes, &barrier, here.file, here.line);
}
