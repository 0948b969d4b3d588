#pragma once
// Records phases and waits of warps for `cupyfa timeline`. Everything here is empty and costs
// nothing. For a recorded launch the host replaces this header with kernels/timeline/timeline.cuh.

#include <tile/timeline_kinds.cuh>

namespace timeline {

// A phase that lasts as long as the object.
struct [[maybe_unused]] Phase {
  __device__ __forceinline__ Phase(Kind, unsigned = 0, unsigned = 0) {}
  Phase(const Phase&) = delete;
};

// event() records a moment, or the start of a phase that end() ends.
__device__ __forceinline__ void event(Kind, unsigned = 0, unsigned = 0) {}
__device__ __forceinline__ void end(Kind) {}
__device__ __forceinline__ void begin_shared(const void*) {}

}  // namespace timeline

// Records a user-defined phase: `const auto phase = mark("name");` lasts to the end of its block.
// As a statement by itself it marks a moment.
template <int size>
__device__ __forceinline__ timeline::Phase mark(const char (&)[size]) {
  return timeline::Phase(timeline::marked);
}
