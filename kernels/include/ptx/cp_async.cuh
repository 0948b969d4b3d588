#pragma once
// Asynchronous copies from global to shared memory.
#include <timeline.cuh>

// Copies 0 to 16 `bytes` and fills up the 16-byte chunk with zeros; both addresses are multiples of
// 16. sm_75 copies synchronously.  PTX: cp.async.cg.shared.global
__device__ __forceinline__ void cp_async(void* shared, const void* global, int bytes) {
  if constexpr (__CUDA_ARCH__ >= 800) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     unsigned(__cvta_generic_to_shared(shared))),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes)
                 : "memory");
  } else {
    uint4 value = {};
    if (bytes == 16) value = *static_cast<const uint4*>(global);
    for (int i = 0; i < bytes % 16 / 2; ++i)
      reinterpret_cast<unsigned short*>(&value)[i] = static_cast<const unsigned short*>(global)[i];
    *static_cast<uint4*>(shared) = value;
  }
}

// Commits this thread's copies as a group.  PTX: cp.async.commit_group
__device__ __forceinline__ void cp_async_commit_group() {
  timeline::event(timeline::copies_begun);
  if constexpr (__CUDA_ARCH__ >= 800) {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
}

// Waits until at most `pending` groups of this thread's copies are in flight. Other threads see the
// data after a barrier.  PTX: cp.async.wait_group
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() {
  const timeline::Phase waiting(timeline::copy_wait, pending);
  if constexpr (__CUDA_ARCH__ >= 800) {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
  }
}
