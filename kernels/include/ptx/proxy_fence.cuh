#pragma once
// Orders this thread's accesses of shared memory before later ones by TMA and wgmma, which other
// threads may start after a barrier that follows. A barrier alone orders threads: wgmma may miss a
// write before it, and TMA may overwrite what an ldmatrix has yet to read.  PTX: fence.proxy.async
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
