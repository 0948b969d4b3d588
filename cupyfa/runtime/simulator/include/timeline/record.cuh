#pragma once
// Writes timeline entries (log.cuh). The simulator has no clock: the host numbers the entries of a
// block in their order.
#include <ptx/clock.cuh>
#include <simulator.h>
#include <tile/timeline_kinds.cuh>
#include <timeline/log.cuh>

extern "C" {
__attribute__((visibility("default"))) timeline::Log timeline_log[timeline_blocks * timeline_warps];
__attribute__((visibility("default"))) extern int timeline_members[];
}

namespace timeline {

// Returns the warp's number if this is its first lane and its block is recorded, else -1.
inline int recorded_warp() {
  const simulator::Coordinates& here = *simulator_coordinates();
  const uint3 &block = here.block, &grid = here.grid_dim;
  const unsigned number = block.x + grid.x * (block.y + grid.y * block.z) - timeline_first;
  if (simulator::lane() != 0 || number >= timeline_blocks) return -1;
  return static_cast<int>(number * timeline_warps + here.thread.x / 32);
}

__attribute__((no_sanitize("thread"), noinline)) inline void record(unsigned kind,
                                                                    unsigned argument) {
  const int warp = recorded_warp();
  if (warp < 0) return;
  Log& log = timeline_log[warp];
  const unsigned index = log.count++;
  if (index >= timeline_capacity) return;
  const unsigned long long clock = cycles();
  log.entries[index] = {unsigned(clock), unsigned(clock >> 32), kind, argument};
}
// Does nothing: simulated blocks have no SM.
inline void record_place(unsigned) {}

}  // namespace timeline
