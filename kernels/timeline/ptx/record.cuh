#pragma once
// The memory of a timeline, and the clocks. The host sets: timeline_first, timeline_blocks: which
// blocks are recorded; timeline_warps of each, timeline_capacity: entries of a warp.

namespace timeline {

struct alignas(16) TimelineEntry {
  unsigned clock_low, clock_high, kind, argument;
};
struct alignas(16) TimelineLog {
  unsigned count, unused[3];  // entries, also those that had no room
  TimelineEntry entries[timeline_capacity];
};
extern "C" {
__device__ TimelineLog timeline_log[timeline_blocks * timeline_warps];
}

// The cycles of this multiprocessor.
__device__ __forceinline__ unsigned long long cycles() {
  unsigned long long clock;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
  return clock;
}
// Nanoseconds of the device; they may advance by up to a microsecond at a time.
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long clock;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(clock)::"memory");
  return clock;
}
__device__ __forceinline__ unsigned multiprocessor() {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

// Writes an entry for the warp: the first of the lanes that are here does. All of them read the
// counter, which stays in L1, so that the warp need not branch: instructions that follow may need
// all of its lanes together.
__device__ __forceinline__ void record_at(unsigned long long clock, unsigned kind,
                                          unsigned argument) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (block - timeline_first >= timeline_blocks) return;
  const bool writes = threadIdx.x % 32 == __ffs(__activemask()) - 1;
  TimelineLog& log = timeline_log[(block - timeline_first) * timeline_warps + threadIdx.x / 32];
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
