#pragma once
// Memory of a recording. The host sets timeline_first and timeline_blocks (which blocks are
// recorded), timeline_warps (warps per block) and timeline_capacity (entries per warp).

namespace timeline {

struct alignas(16) Entry {
  unsigned clock_low, clock_high, kind, argument;
};
// The recorded entries of one warp.
struct alignas(16) Log {
  unsigned count, unused[3];  // number of entries, including dropped ones
  Entry entries[timeline_capacity];
};

}  // namespace timeline
