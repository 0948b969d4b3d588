#pragma once
// Copies from global to shared memory that go on while the thread does other things.
//
// They land as late as a device may let them: in the wait that requires it.
#include <simulator.h>

namespace simulator {

struct Copy {
  void* shared;
  const void* global;
  int bytes;
  unsigned group;
  Here here;
  Copy* next;
};

// A thread's copies that have not landed, oldest first.
struct Copies {
  Copy* first;
  Copy* last;
  Copy* unused;
  const void* newest_chunk;
  unsigned groups;  // that were ended
};

struct CopyChunk {
  Copy copies[32];
};

inline Copies& thread_copies() {
  static const char key = 0;
  return thread_storage<Copies>(&key);
}

// The storage of copies is the runtime's own, which a kernel's checked accesses may not touch.
#define CUPYFA_UNCHECKED __attribute__((no_sanitize("thread"), noinline)) inline

CUPYFA_UNCHECKED Copy* unused_copy(Copies& copies) {
  if (copies.unused == nullptr) {
    const void* key = copies.newest_chunk == nullptr ? &copies : copies.newest_chunk;
    CopyChunk& chunk = thread_storage<CopyChunk>(key);
    copies.newest_chunk = &chunk;
    for (Copy& copy : chunk.copies) {
      copy.next = copies.unused;
      copies.unused = &copy;
    }
  }
  Copy* copy = copies.unused;
  copies.unused = copy->next;
  return copy;
}

CUPYFA_UNCHECKED void begin_copy(void* shared, const void* global, int bytes, Here here) {
  Copies& copies = thread_copies();
  Copy* copy = unused_copy(copies);
  copy->shared = shared;
  copy->global = global;
  copy->bytes = bytes;
  copy->group = copies.groups;
  copy->here = here;
  copy->next = nullptr;
  (copies.first == nullptr ? copies.first : copies.last->next) = copy;
  copies.last = copy;
}

CUPYFA_UNCHECKED void land(const Copy& copy) {
  check_read(copy.global, static_cast<size_t>(copy.bytes), copy.here);
  check_write(copy.shared, 16, copy.here);
  if (copy.bytes == 16) {
    *static_cast<uint4*>(copy.shared) = *static_cast<const uint4*>(copy.global);
    return;
  }
  const auto* from = static_cast<const unsigned char*>(copy.global);
  auto* to = static_cast<volatile unsigned char*>(copy.shared);
  for (int i = 0; i < 16; ++i) to[i] = i < copy.bytes ? from[i] : 0;
}

CUPYFA_UNCHECKED void end_group() {
  ++thread_copies().groups;
}

CUPYFA_UNCHECKED void land_all_but(unsigned pending) {
  Copies& copies = thread_copies();
  while (copies.first != nullptr && copies.first->group + pending < copies.groups) {
    Copy* copy = copies.first;
    land(*copy);
    copies.first = copy->next;
    copy->next = copies.unused;
    copies.unused = copy;
  }
}

#undef CUPYFA_UNCHECKED

}  // namespace simulator

// Copies `bytes` of 16, 0 to 16, and writes zeros for the rest; both addresses are multiples of 16.
inline void cp_async(void* shared, const void* global, int bytes, simulator::Here here = {}) {
  if (bytes < 0 || bytes > 16) {
    simulator::fault("calls cp_async for less than 0 or more than 16 bytes", here);
  }
  if (reinterpret_cast<size_t>(shared) % 16 != 0 || reinterpret_cast<size_t>(global) % 16 != 0) {
    simulator::fault("calls cp_async with an address that is not a multiple of 16", here);
  }
  // An address that nothing is read from may be that of a row far beyond its tensor: anywhere.
  if (!simulator::is_shared(shared) || (bytes > 0 && simulator::is_shared(global))) {
    simulator::fault("calls cp_async other than from global to shared memory", here);
  }
  // Wrong accesses are reported here, even without a wait; the copy itself is made in the wait.
  simulator::check_read(global, static_cast<size_t>(bytes), here);
  simulator::announce_write(shared, 16, here);
  simulator::begin_copy(shared, global, bytes, here);
}

// Ends a group of this thread's copies.
inline void cp_async_commit_group() {
  simulator::end_group();
}

// Waits until at most `pending` groups of this thread's copies are still under way; a barrier makes
// what has landed known to other threads.
template <int pending>
inline void cp_async_wait_group() {
  static_assert(pending >= 0, "a number of groups");
  simulator::land_all_but(pending);
}
