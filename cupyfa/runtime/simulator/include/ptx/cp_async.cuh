#pragma once
// Asynchronous copies from global to shared memory.
//
// The simulator writes the data in the wait for the copy, and reports an earlier use as a race.
#include <simulator.h>
#include <timeline.cuh>

// Copies `bytes` (0 to 16) bytes and fills the rest of the 16-byte chunk with zeros. Both addresses
// are multiples of 16.
inline void cp_async(void* shared, const void* global, int bytes, simulator::Here here = {}) {
  if (bytes > 0) timeline::event(timeline::copied, unsigned(size_t(global) / 16));
  simulator_begin_copy(shared, global, bytes, here.file, here.line);
}

// Commits this thread's copies as a group.
inline void cp_async_commit_group() {
  timeline::event(timeline::copies_begun);
  simulator_commit_copies();
}

// Waits until at most `pending` groups of this thread's copies are in flight. Other threads see the
// data after a barrier.
template <int pending>
inline void cp_async_wait_group() {
  static_assert(pending >= 0, "a number of groups");
  const timeline::Phase waiting(timeline::copy_wait, pending);
  simulator_wait_for_copies(pending);
}
