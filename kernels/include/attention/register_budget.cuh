#pragma once
// Registers per thread with one producer and `consumers` consumer warpgroups (ptx/setmaxnreg.cuh).
// A warpgroup that requests more than the block has at launch would wait forever.

#include <tile/warp.cuh>

template <int consumers, int producer_registers>
struct RegisterBudget {  // for 2 or more consumers: a thread has at most 255 registers
  static constexpr int sharing = consumers > 2 ? consumers : 2, producer = producer_registers;
  static constexpr int at_launch = 65536 / warpgroup_size / (sharing + 1) / 8 * 8;
  static constexpr int consumer = at_launch + (at_launch - producer) / sharing / 8 * 8;
};
