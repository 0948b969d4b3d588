#pragma once
// Records what warps do and wait for, with the time. The functions are those of
// kernels/include/timeline.cuh; the source of a launch that is recorded begins with this file.

#include <tile/timeline_kinds.cuh>
#include <timeline/record.cuh>

namespace timeline {

// Unless `timeline_detailed`, only a few kinds are recorded of each block.
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

// Records the whole kernel: every return ends it.
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

// FNV-1a, which compilers evaluate to a constant.
template <int size>
__device__ __forceinline__ constexpr unsigned hash_of(const char (&name)[size]) {
  unsigned hash = 2166136261u;
#pragma unroll
  for (int i = 0; i + 1 < size; ++i) hash = (hash ^ (unsigned char)(name[i])) * 16777619u;
  return hash;
}

// Describes a member of struct Shared: the size of an element, and for a Pipeline how many of its
// barriers are for "full".
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
