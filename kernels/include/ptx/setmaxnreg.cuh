#pragma once
// Warp specialisation: a warpgroup's registers, and which thread of a warp acts.

// Sets the registers of each thread of the warpgroup to `count`, a multiple of 8 from 24 to 256. An
// increase waits until others have decreased.  setmaxnreg.dec, setmaxnreg.inc
template <int count>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Returns a value that all lanes have; the compiler then keeps it in uniform registers.
__device__ __forceinline__ int warp_uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// True in one lane of the warp. All lanes call it.  elect.sync
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}
