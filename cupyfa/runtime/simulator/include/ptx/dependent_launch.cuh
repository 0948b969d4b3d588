#pragma once
// Programmatic dependent launch. The simulator starts each launch after the previous one has ended,
// and reports accesses that should follow a wait_for_launch_before() but do not.
#include <simulator.h>

// Waits until the previous launch has ended; all of its writes are then visible.
inline void wait_for_launch_before() {
  simulator_wait_for_launch_before();
}

// Allows the next launch to start once all blocks have called this or ended.
inline void launch_dependents(simulator::Here here = {}) {
  simulator_launch_dependents(here.file, here.line);
}
