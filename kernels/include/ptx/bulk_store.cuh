#pragma once
// Sums that the tensor memory accelerator adds to global memory, and waits for its stores.
#include <ptx/tma.cuh>

// Starts to add `count` floats, a multiple of 4, to floats in global memory, each atomically, in
// any order. It counts as a store. cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32
__device__ __forceinline__ void bulk_add(float* memory, const float* shared, int count) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(memory),
      "r"(shared_address(shared)), "r"(4 * count)
      : "memory");
}

// Ends a group of this thread's stores.  cp.async.bulk.commit_group
__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read shared memory.  cp.async.bulk.wait_group.read
__device__ __forceinline__ void bulk_wait_group_read() {
  const timeline::Phase waiting(timeline::store_wait);
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until this thread's stores are complete and visible to it.
// cp.async.bulk.wait_group
__device__ __forceinline__ void bulk_wait_group() {
  const timeline::Phase waiting(timeline::store_wait);
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes what this thread wrote to shared memory visible to copies and tensor cores; a barrier after
// it lets another thread start them.  fence.proxy.async
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
