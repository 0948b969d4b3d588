#pragma once
// TMA reduce-adds to global memory, and waits for TMA stores.
#include <ptx/proxy_fence.cuh>
#include <ptx/tma.cuh>

// Starts an atomic add of `count` floats, a multiple of 4, from shared to global memory. The order
// of additions is unspecified. Commits and waits treat it as a store.
// PTX: cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32
__device__ __forceinline__ void bulk_add(float* memory, const float* shared, int count) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(memory),
      "r"(shared_address(shared)), "r"(4 * count)
      : "memory");
}

// Commits this thread's stores as a group.  PTX: cp.async.bulk.commit_group
__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read shared memory.  PTX: cp.async.bulk.wait_group.read
__device__ __forceinline__ void bulk_wait_group_read() {
  const timeline::Phase waiting(timeline::store_wait);
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until this thread's stores are complete and visible to it.  PTX: cp.async.bulk.wait_group
__device__ __forceinline__ void bulk_wait_group() {
  const timeline::Phase waiting(timeline::store_wait);
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
