#pragma once
// Barriers in shared memory that count threads and bytes. A barrier goes through phases, 0 1 0 1 …:
// one ends when as many threads have arrived as it was made for and all expected bytes have come.
// Whoever waits names the phase that he waits for, so he must know how often he has waited.
// PTX: mbarrier.

struct Barrier {
  unsigned long long state;
};

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return unsigned(__cvta_generic_to_shared(shared));
}

// Makes a barrier for so many arrivals a phase; one thread does it.  mbarrier.init
__device__ __forceinline__ void init_barrier(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// Lets copies see the barriers that this thread has made; a __syncthreads does so for threads.
// fence.mbarrier_init
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive
__device__ __forceinline__ void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// Arrives, and lets the phase wait for so many bytes of copies.  mbarrier.arrive.expect_tx
__device__ __forceinline__ void arrive_expect_tx(Barrier& barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase, 0 or 1, has ended. Of a new barrier phase 1 counts as ended.
// mbarrier.try_wait.parity
__device__ __forceinline__ void wait(Barrier& barrier, int phase) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(&barrier)),
      "r"(phase)
      : "memory");
}
