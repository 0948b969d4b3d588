#pragma once
// Warp specialization: registers and roles. Here no thread waits for registers: at its end a block
// is checked not to hold more than it has.
#include <simulator.h>

// Sets the registers of each thread of the warpgroup to `count`, a multiple of 8 from 24 to 256. An
// increase waits until others have decreased.
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

// Returns a value that is equal in all lanes; the compiler may then keep it in uniform registers.
inline int warp_uniform(int value, simulator::Here here = {}) {
  return __shfl_sync(0xffffffffu, value, 0, 32, here);
}

// True in one lane of the warp. All lanes call it.
inline bool elect_one(simulator::Here here = {}) {
  simulator_ballot(0xffffffffu, true, "elect_one", here.file, here.line);
  return simulator::lane() == simulator_elected_lane();
}
