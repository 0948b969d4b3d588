#pragma once
// A multistage pipeline in shared memory between a producer, one thread that issues TMA copies, and
// its consumers, warps or warpgroups. Each stage has a "full" and an "empty" barrier.

#include <tile/tma_tile.cuh>
#include <tile/warp.cuh>

// The next stage and the phase of its barriers.
template <int stages>
struct PipelineState {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < stages) return;
    stage = 0;
    phase ^= 1;
  }
};

// The barriers of a pipeline; the buffers are members of a kernel's struct Shared. A stage that is
// loaded in parts has a `full` barrier per part, so that consumers can start with the first part.
template <int stages, int parts = 1>
struct Pipeline {
  Barrier full[parts][stages], empty[stages];

  // One thread initialises the barriers, and calls fence_barrier_init() after the last pipeline. A
  // part is full after `loads` loads, and a stage is empty once all `consumers` have released it.
  __device__ __forceinline__ void init(int consumers, int loads = 1) {
    for (int stage = 0; stage < stages; ++stage) {
      for (int part = 0; part < parts; ++part) init_barrier(full[part][stage], loads);
      init_barrier(empty[stage], consumers);
    }
  }

  // Producer: waits until the stage is empty (initially all are), and returns its `full` barrier.
  __device__ __forceinline__ Barrier& acquire(PipelineState<stages> state = {}) {
    ::wait(empty[state.stage], state.phase ^ 1);
    return full[0][state.stage];
  }

  // Consumer: waits until the stage, or a part of it, is full.
  __device__ __forceinline__ void wait(PipelineState<stages> state = {}, int part = 0) {
    ::wait(full[part][state.stage], state.phase);
  }

  // Consumer: signals that this thread has read the stage. In release() one thread signals for its
  // warpgroup: a product for which it has waited has read the stage for all four warps.
  __device__ __forceinline__ void arrive(PipelineState<stages> state) {
    ::arrive(empty[state.stage]);
  }
  __device__ __forceinline__ void release(PipelineState<stages> state) {
    if (threadIdx.x % warpgroup_size == 0) arrive(state);
  }
};
