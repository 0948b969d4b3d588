#pragma once
// Writes entries of a recording (log.cuh).

#include <ptx/clock.cuh>
#include <tile/timeline_kinds.cuh>
#include <timeline/log.cuh>

extern "C" {
__device__ timeline::Log timeline_log[timeline_blocks * timeline_warps];
}

namespace timeline {

// Writes an entry with the time clock(index) for the warp. All active lanes read the index, which
// stays in L1, and only the first lane writes, so that the warp need not branch: later instructions
// may need all of its lanes together.
template <class Clock>
__device__ __forceinline__ void record_with(Clock clock, unsigned kind, unsigned argument) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (block - timeline_first >= timeline_blocks) return;
  const bool writes = threadIdx.x % 32 == __ffs(__activemask()) - 1;
  Log& log = timeline_log[(block - timeline_first) * timeline_warps + threadIdx.x / 32];
  const unsigned index = log.count;
  const unsigned long long time = clock(index);
  if (writes) log.count = index + 1;
  if (writes && index < timeline_capacity)
    *reinterpret_cast<uint4*>(&log.entries[index]) =
        make_uint4(unsigned(time), unsigned(time >> 32), kind, argument);
}
__device__ __forceinline__ void record(unsigned kind, unsigned argument) {
  if ((kind & 0xff) == tile) return;  // tiles would cost time
  // A barrier of the block may stall a warp only at its next memory access (BAR.SYNC with
  // .DEFER_BLOCKING) and not at a clock read. After barriers the index is read first.
  if (kind == (named_wait | ended) || kind == (block_wait | ended)) {
    record_with([](unsigned index) { return cycles_after(index); }, kind, argument);
  } else {
    const unsigned long long now = cycles();
    record_with([=](unsigned) { return now; }, kind, argument);
  }
}
__device__ __forceinline__ void record_place(unsigned kind) {
  const unsigned long long now = nanoseconds();
  record_with([=](unsigned) { return now; }, kind, multiprocessor());
}

}  // namespace timeline
