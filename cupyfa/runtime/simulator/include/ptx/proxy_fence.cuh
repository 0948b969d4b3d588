#pragma once
// Orders accesses of shared memory by threads before later ones by TMA and wgmma. The simulator
// reports a copy or product that no fence separates from writes, and a copy from reads.
#include <simulator.h>

inline void fence_proxy_async() {
  simulator_fence_for_copies();
}
