#pragma once
// Programmatic dependent launch. Here a launch begins when the one before it has ended; accesses
// that should wait for that end and do not are faults.
#include <simulator.h>

// Waits until the launch before has ended, and sees all that it wrote.
inline void wait_for_launch_before() {
  simulator_wait_for_launch_before();
}

// The next launch may begin when all blocks have called this or ended.
inline void launch_dependents(simulator::Here here = {}) {
  simulator_launch_dependents(here.file, here.line);
}
