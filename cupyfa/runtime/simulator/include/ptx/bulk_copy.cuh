#pragma once
// Copies of contiguous bytes by the tensor memory accelerator.
#include <ptx/tma.cuh>

// Starts to copy `bytes` bytes; `bytes` and both addresses are multiples of 16. The barrier counts
// the bytes.
inline void bulk_load(void* shared, const void* memory, int bytes, Barrier& barrier,
                      simulator::Here here = {}) {
  simulator_load_bytes(shared, memory, bytes, &barrier, here.file, here.line);
}
