#pragma once
// How many registers the threads of a multiprocessor get when one warpgroup loads and others
// compute: the producer gives up what it does not need (ptx/setmaxnreg.cuh).

#include <tile/warp.cuh>

// For one producer and so many warpgroups of consumers; a multiple of 8 for each. A single
// warpgroup of consumers gets what each of two would: the compiler has no use for more.
template <int consumers, int producer_registers>
struct RegisterBudget {
  static constexpr int all = 65536 / warpgroup_size;
  static constexpr int producer = producer_registers;
  static constexpr int consumer = (all - producer) / (consumers > 2 ? consumers : 2) / 8 * 8;
};
