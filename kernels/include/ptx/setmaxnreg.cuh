#pragma once
// Warp specialization: register reallocation, and election of one thread per warp.

// Sets the registers per thread of the warpgroup, a multiple of 8 from 24 to 256. An increase waits
// until other warpgroups have released registers.  PTX: setmaxnreg.dec, setmaxnreg.inc
template <int count>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Broadcasts lane 0's value; the compiler then keeps the result in a uniform register.
__device__ __forceinline__ int warp_uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// Returns true in one lane of the warp; all lanes must call this.  PTX: elect.sync
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}
