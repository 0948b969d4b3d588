#pragma once
// The registers of a thread when one warpgroup loads and `consumers` compute (ptx/setmaxnreg.cuh),
// multiples of 8. A single consumer gets what each of two would: a thread has at most 255.

#include <tile/warp.cuh>

template <int consumers, int producer_registers>
struct RegisterBudget {
  static constexpr int all = 65536 / warpgroup_size;  // of one thread of each warpgroup
  static constexpr int producer = producer_registers;
  static constexpr int consumer = (all - producer) / (consumers > 2 ? consumers : 2) / 8 * 8;
};
