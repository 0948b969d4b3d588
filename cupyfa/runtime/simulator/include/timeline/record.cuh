#pragma once
// Writes timeline entries (log.cuh). The simulator has no clock: the host models times from the
// order of a block's entries. Products and copies add up their work for the warp's next entry.
#include <ptx/clock.cuh>
#include <simulator.h>
#include <tile/timeline_kinds.cuh>
#include <timeline/log.cuh>

extern "C" {
__attribute__((visibility("default"))) timeline::Log timeline_log[timeline_blocks * timeline_warps];
__attribute__((visibility("default"))) extern int timeline_members[];
}

namespace timeline {

constexpr int works = 3;  // number of kinds that count work; they are the last ones of the enum
inline unsigned work_done[timeline_blocks * timeline_warps][works];  // since its last entry

// Returns the warp's number if this is its first lane and its block is recorded, else -1.
inline int recorded_warp() {
  const simulator::Coordinates& here = *simulator_coordinates();
  const uint3 &block = here.block, &grid = here.grid_dim;
  const unsigned number = block.x + grid.x * (block.y + grid.y * block.z) - timeline_first;
  if (simulator::lane() != 0 || number >= timeline_blocks) return -1;
  return static_cast<int>(number * timeline_warps + here.thread.x / 32);
}

__attribute__((no_sanitize("thread"), noinline)) inline void append(int warp, unsigned kind,
                                                                    unsigned argument) {
  Log& log = timeline_log[warp];
  const unsigned index = log.count++;
  if (index >= timeline_capacity) return;
  const unsigned long long clock = cycles();
  log.entries[index] = {unsigned(clock), unsigned(clock >> 32), kind, argument};
}

__attribute__((no_sanitize("thread"), noinline)) inline void record(unsigned kind,
                                                                    unsigned argument) {
  const int warp = recorded_warp();
  if (warp < 0) return;
  const unsigned name = kind & 0xff;
  if (name >= worked_wgmma && name < ended) {
    work_done[warp][name - worked_wgmma] += kind >> 8;
    return;
  }
  for (int i = 0; i < works; ++i) {
    unsigned& work = work_done[warp][i];
    if (work != 0) append(warp, worked_wgmma + i, work);
    work = 0;
  }
  append(warp, kind, argument);
}
// Does nothing: simulated blocks have no SM.
inline void record_place(unsigned) {}

}  // namespace timeline
