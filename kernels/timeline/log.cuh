#pragma once
// The memory of a recording. The host sets timeline_first and timeline_blocks (which blocks are
// recorded), timeline_warps (warps of each block) and timeline_capacity (entries of a warp).

namespace timeline {

struct alignas(16) Entry {
  unsigned clock_low, clock_high, kind, argument;
};
// The entries of a warp.
struct alignas(16) Log {
  unsigned count, unused[3];  // entries, including those that had no room
  Entry entries[timeline_capacity];
};

}  // namespace timeline
