#pragma once
// How the last of several blocks learns that it is the last.
#include <simulator.h>

// Counts a block's arrival: from 0 to `count` - 1, and then 0 again. Returns how many came before.
// What this thread has written or seen is seen by those that arrive later.
inline int arrive(unsigned* arrived, int count) {
  __threadfence();
  return static_cast<int>(atomicInc(arrived, static_cast<unsigned>(count - 1)));
}
