#pragma once
// Ping-pong: warpgroups take turns to start products, so that one computes exponentials while the
// tensor cores work for another.

#include <ptx/named_barrier.cuh>
#include <tile/warp.cuh>

// A score may exceed the maximum of its row by this much, as a power of two, before the maximum is
// raised. P is at most 2^8; float16 holds numbers up to almost 2^16.
constexpr int slack = 8;

// Turns of `consumers` warpgroups, with named barriers 1 … consumers.
template <int consumers>
struct PingPong {
  // Waits until it is the warpgroup's turn to begin products.
  static __device__ __forceinline__ void wait(int warpgroup) {
    barrier_sync(1 + warpgroup, 2 * warpgroup_size);
  }
  // Gives the turn to the next warpgroup.
  static __device__ __forceinline__ void arrive(int warpgroup) {
    barrier_arrive(1 + (warpgroup + 1) % consumers, 2 * warpgroup_size);
  }
};
