#pragma once
// What four warps in a row share out among each other: registers, and roles. Here there are as
// many registers as anybody wants.
#include <simulator.h>

// Gives registers back, or takes them, so that each thread of the warpgroup has `count`, a multiple
// of 8 from 24 to 256. Those that take wait for those that give.
template <int count>
inline void decrease_registers() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "a number of registers");
}
template <int count>
inline void increase_registers() {
  decrease_registers<count>();
}

// A value that all lanes of the warp have, as one that the compiler knows to be such: what is
// computed from it then takes no registers of the lanes.
inline int warp_uniform(int value, simulator::Here here = {}) {
  return __shfl_sync(0xffffffffu, value, 0, 32, here);
}

// True in one lane of the warp, which all of its lanes ask together.
inline bool elect_one(simulator::Here here = {}) {
  simulator_ballot(0xffffffffu, true, "elect_one", here.file, here.line);
  return simulator::lane() == simulator_elected_lane();
}
