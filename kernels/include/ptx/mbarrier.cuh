#pragma once
// Barriers in shared memory (PTX: mbarrier). A phase completes when `arrivals` threads have arrived
// and all expected bytes have been copied. Phases alternate between 0 and 1.
#include <timeline.cuh>

struct Barrier {
  unsigned long long state;
};

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return unsigned(__cvta_generic_to_shared(shared));
}

// Initialises a barrier; one thread calls this.  PTX: mbarrier.init
__device__ __forceinline__ void init_barrier(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to TMA; __syncthreads makes them visible to threads.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier& barrier) {
  timeline::event(timeline::barrier_arrive, shared_address(&barrier));
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// Arrives and adds `bytes` to the bytes that the phase expects.  PTX: mbarrier.arrive.expect_tx
__device__ __forceinline__ void arrive_expect_tx(Barrier& barrier, int bytes) {
  timeline::event(timeline::barrier_arrive, shared_address(&barrier), bytes);
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

// Waits for the end of a phase; on a new barrier, phase 1 has ended.  PTX: mbarrier.try_wait.parity
__device__ __forceinline__ void wait(Barrier& barrier, int phase) {
  const timeline::Phase waiting(timeline::barrier_wait, shared_address(&barrier));
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(&barrier)),
      "r"(phase)
      : "memory");
}
