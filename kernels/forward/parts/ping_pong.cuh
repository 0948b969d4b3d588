#pragma once
// How exponentials of one warpgroup and products of another go on at the same time.

#include <forward/parts/consumers.cuh>

// So far, as a power of two, may a score exceed the maximum that weights are relative to. They stay
// below 2^8, of which float16 holds 2^16.
constexpr int slack = 8;

// Warpgroups begin their products in turns; the first has one to begin with.
__device__ __forceinline__ void await_turn(int warpgroup) {
  barrier_sync(1 + consumers + warpgroup, 2 * warpgroup_size);
}
__device__ __forceinline__ void pass_turn(int warpgroup) {
  barrier_arrive(1 + consumers + (warpgroup + 1) % consumers, 2 * warpgroup_size);
}
