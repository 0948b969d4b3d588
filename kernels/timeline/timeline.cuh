#pragma once
// Records what warps compute and wait for, with timestamps. Implements the functions of
// kernels/include/timeline.cuh; the source of a recorded launch begins with this file.

#include <tile/timeline_kinds.cuh>
#include <timeline/record.cuh>

namespace timeline {

// Returns whether events of a kind are recorded: all if `timeline_detailed`, otherwise only a few.
__device__ __forceinline__ constexpr bool is_recorded(unsigned kind) {
  return timeline_detailed || kind == in_block || kind == epilogue || kind == marked;
}

__device__ __forceinline__ void event(Kind kind, unsigned argument = 0, unsigned amount = 0) {
  if (is_recorded(kind)) record(amount << 8 | kind, argument);
}
__device__ __forceinline__ void end(Kind kind) {
  if (is_recorded(kind)) record(kind | ended, 0);
}

__device__ __forceinline__ void begin_shared(const void* memory) {
  event(shared_begins, unsigned(__cvta_generic_to_shared(memory)));
}

struct [[maybe_unused]] Phase {
  Kind kind;

  __device__ __forceinline__ Phase(Kind kind, unsigned argument = 0, unsigned amount = 0)
      : kind(kind) {
    event(kind, argument, amount);
  }
  Phase(const Phase&) = delete;
  __device__ __forceinline__ ~Phase() { end(kind); }
};

// Records the lifetime of a block; the destructor runs at every return.
struct [[maybe_unused]] Block {
  __device__ __forceinline__ Block() {
    record_place(placed);
    record(in_block, 0);
  }
  Block(const Block&) = delete;
  __device__ __forceinline__ ~Block() {
    record(in_block | ended, 0);
    record_place(placed);
  }
};

// Record the beginning and end of __syncthreads, which is a macro here.
__device__ __forceinline__ void begin_block_wait() {
  event(block_wait);
}
__device__ __forceinline__ void end_block_wait() {
  end(block_wait);
}

// Returns the FNV-1a hash of a name, which compilers evaluate at compile time.
template <int size>
__device__ __forceinline__ constexpr unsigned hash_of(const char (&name)[size]) {
  unsigned hash = 2166136261u;
#pragma unroll
  for (int i = 0; i + 1 < size; ++i) hash = (hash ^ (unsigned char)(name[i])) * 16777619u;
  return hash;
}

// Describes a member of struct Shared: the size of an element and, for a Pipeline, the number of
// its `full` barriers.
template <class T>
struct Member {
  static constexpr int bytes = sizeof(T);
  template <class U>
  static constexpr int full_of(decltype(sizeof(U::full))) {
    return sizeof(U::full) / 8;
  }
  template <class U>
  static constexpr int full_of(...) {
    return 0;
  }
  static constexpr int full = full_of<T>(0);
};
template <class T, int count>
struct Member<T[count]> : Member<T> {};

}  // namespace timeline

template <int size>
__device__ __forceinline__ timeline::Phase mark(const char (&name)[size]) {
  return timeline::Phase(timeline::marked, timeline::hash_of(name));
}
