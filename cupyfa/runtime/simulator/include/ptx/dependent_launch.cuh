#pragma once
// Programmatic dependent launch. Here a launch begins after the previous one has ended; accesses
// that lack the wait for its end are faults.
#include <simulator.h>

// Waits until the previous launch has ended; all of its writes are then visible.
inline void wait_for_launch_before() {
  simulator_wait_for_launch_before();
}

// The next launch may begin when all blocks have called this or ended.
inline void launch_dependents(simulator::Here here = {}) {
  simulator_launch_dependents(here.file, here.line);
}
