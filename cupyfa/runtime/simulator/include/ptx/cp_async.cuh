#pragma once
// Copies from global to shared memory that go on while the thread does other things.
//
// They land as late as a device may let them: in the wait that requires it. An earlier use is
// reported as a race.
#include <simulator.h>
#include <timeline.cuh>

// Copies `bytes` of 16, 0 to 16, and writes zeros for the rest; both addresses are multiples of 16.
inline void cp_async(void* shared, const void* global, int bytes, simulator::Here here = {}) {
  timeline::event(timeline::worked_copies, 0, 16);
  simulator_begin_copy(shared, global, bytes, here.file, here.line);
}

// Ends a group of this thread's copies.
inline void cp_async_commit_group() {
  timeline::event(timeline::copies_begun);
  simulator_commit_copies();
}

// Waits until at most `pending` groups of this thread's copies are still under way; a barrier makes
// what has landed known to other threads.
template <int pending>
inline void cp_async_wait_group() {
  static_assert(pending >= 0, "a number of groups");
  const timeline::Phase waiting(timeline::copy_wait, pending);
  simulator_wait_for_copies(pending);
}
