#pragma once
// Ping-pong: warpgroups take turns issuing products, so that one computes exponentials while the
// tensor cores work for another.

#include <ptx/named_barrier.cuh>
#include <tile/warp.cuh>

// Orders the turns of `consumers` warpgroups by named barriers 1 … consumers. At each of them two
// warpgroups arrive: the one that waits for its turn, and the one that passes the turn to it.
template <int consumers>
struct PingPong {
  // Waits for the warpgroup's turn to issue products.
  static __device__ __forceinline__ void wait(int warpgroup) {
    barrier_sync(1 + warpgroup, 2 * warpgroup_size);
  }
  // Passes the turn to the next warpgroup.
  static __device__ __forceinline__ void arrive(int warpgroup) {
    barrier_arrive(1 + (warpgroup + 1) % consumers, 2 * warpgroup_size);
  }
};
