#pragma once
// The registers of a thread when one warpgroup loads and `consumers` compute (ptx/setmaxnreg.cuh),
// multiples of 8. A warpgroup would wait forever for more than the block has at its launch.

#include <tile/warp.cuh>

template <int consumers, int producer_registers>
struct RegisterBudget {  // a single consumer gets what each of two would: at most 255
  static constexpr int sharing = consumers > 2 ? consumers : 2, producer = producer_registers;
  static constexpr int at_launch = 65536 / warpgroup_size / (sharing + 1) / 8 * 8;
  static constexpr int consumer = at_launch + (at_launch - producer) / sharing / 8 * 8;
};
