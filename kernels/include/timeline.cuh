#pragma once
// Records what warps do and wait for, for `cupyfa timeline`. Everything here is empty and costs
// nothing; a launch that is recorded gets kernels/timeline/timeline.cuh in place of this header.

#include <tile/timeline_kinds.cuh>

namespace timeline {

// A phase lasts as long as the object.
struct [[maybe_unused]] Phase {
  __device__ __forceinline__ Phase(Kind, unsigned = 0, unsigned = 0) {}
  Phase(const Phase&) = delete;
};

// A moment, or the beginning of a phase that `end` ends; where dynamic shared memory begins.
__device__ __forceinline__ void event(Kind, unsigned = 0, unsigned = 0) {}
__device__ __forceinline__ void end(Kind) {}
__device__ __forceinline__ void begin_shared(const void*) {}

}  // namespace timeline

// A phase of your own: `const auto phase = mark("name");` lasts to the end of its block. As a
// statement by itself it marks a moment.
template <int size>
__device__ __forceinline__ timeline::Phase mark(const char (&)[size]) {
  return timeline::Phase(timeline::marked);
}
