#pragma once
// The memory of a timeline. There are no clocks: the order of a block's entries is recorded, from
// which the host computes times by a model. So that it knows what the work is, products and copies
// count here what they do, and the next entry of the warp says it.
#include <simulator.h>
#include <tile/timeline_kinds.cuh>

struct alignas(16) TimelineEntry {
  unsigned clock_low, clock_high, kind, argument;
};
struct alignas(16) TimelineLog {
  unsigned count, unused[3];  // entries, also those that had no room
  TimelineEntry entries[timeline_capacity];
};
extern "C" {
__attribute__((visibility("default"))) TimelineLog timeline_log[timeline_blocks * timeline_warps];
__attribute__((visibility("default"))) extern int timeline_members[];
}

namespace simulator {

constexpr int timeline_works = 3;  // kinds of work, which are the last ones
inline unsigned long long timeline_order[timeline_blocks];  // entries of each block so far
inline unsigned timeline_work[timeline_blocks * timeline_warps][timeline_works];

// The warp's number if its first lane is in a block that is recorded, else -1.
inline int timeline_warp() {
  const Coordinates& here = *simulator_coordinates();
  const uint3 &block = here.block, &grid = here.grid_dim;
  const unsigned number = block.x + grid.x * (block.y + grid.y * block.z) - timeline_first;
  if (lane() != 0 || number >= timeline_blocks) return -1;
  return static_cast<int>(number * timeline_warps + here.thread.x / 32);
}

__attribute__((no_sanitize("thread"), noinline)) inline void append(int warp, unsigned kind,
                                                                    unsigned argument) {
  TimelineLog& log = timeline_log[warp];
  const unsigned index = log.count++;
  if (index >= timeline_capacity) return;
  const unsigned long long order = timeline_order[warp / int(timeline_warps)]++;
  log.entries[index] = {unsigned(order), unsigned(order >> 32), kind, argument};
}

}  // namespace simulator

namespace timeline {

__attribute__((no_sanitize("thread"), noinline)) inline void record(unsigned kind,
                                                                    unsigned argument) {
  const int warp = simulator::timeline_warp();
  if (warp < 0) return;
  const unsigned name = kind & 0xff;
  if (name >= timeline::worked_wgmma && name < timeline::ended) {
    simulator::timeline_work[warp][name - timeline::worked_wgmma] += kind >> 8;
    return;
  }
  for (int i = 0; i < simulator::timeline_works; ++i) {
    unsigned& work = simulator::timeline_work[warp][i];
    if (work != 0) simulator::append(warp, timeline::worked_wgmma + i, work);
    work = 0;
  }
  simulator::append(warp, kind, argument);
}
// Blocks have no place.
inline void record_place(unsigned) {}

}  // namespace timeline
