#pragma once
// Warp specialization: register reallocation, and election of one thread per warp. No simulated
// thread waits for registers; the simulator checks a block's total of registers at its end.
#include <simulator.h>

// Sets the registers per thread of the warpgroup, a multiple of 8 from 24 to 256. On a device an
// increase waits until other warpgroups have released registers.
template <int count>
inline void decrease_registers(simulator::Here here = {}) {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "a number of registers");
  simulator_set_registers(count, false, here.file, here.line);
}
template <int count>
inline void increase_registers(simulator::Here here = {}) {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "a number of registers");
  simulator_set_registers(count, true, here.file, here.line);
}

// Broadcasts lane 0's value; a compiler for a device then keeps the result in a uniform register.
inline int warp_uniform(int value, simulator::Here here = {}) {
  return __shfl_sync(0xffffffffu, value, 0, 32, here);
}

// Returns true in one lane of the warp; all lanes must call this.
inline bool elect_one(simulator::Here here = {}) {
  simulator_ballot(0xffffffffu, true, "elect_one", here.file, here.line);
  return simulator::lane() == simulator_elected_lane();
}
