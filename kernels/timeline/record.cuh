#pragma once
// Writes entries of a recording (log.cuh).

#include <ptx/clock.cuh>
#include <timeline/log.cuh>

extern "C" {
__device__ timeline::Log timeline_log[timeline_blocks * timeline_warps];
}

namespace timeline {

// Writes an entry for the warp: the first of the lanes that are here does. All of them read the
// counter, which stays in L1, so that the warp need not branch: instructions that follow may need
// all of its lanes together.
__device__ __forceinline__ void record_at(unsigned long long clock, unsigned kind,
                                          unsigned argument) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (block - timeline_first >= timeline_blocks) return;
  const bool writes = threadIdx.x % 32 == __ffs(__activemask()) - 1;
  Log& log = timeline_log[(block - timeline_first) * timeline_warps + threadIdx.x / 32];
  const unsigned index = log.count;
  if (writes) log.count = index + 1;
  if (writes && index < timeline_capacity)
    *reinterpret_cast<uint4*>(&log.entries[index]) =
        make_uint4(unsigned(clock), unsigned(clock >> 32), kind, argument);
}
__device__ __forceinline__ void record(unsigned kind, unsigned argument) {
  record_at(cycles(), kind, argument);
}
__device__ __forceinline__ void record_place(unsigned kind) {
  record_at(nanoseconds(), kind, multiprocessor());
}

}  // namespace timeline
