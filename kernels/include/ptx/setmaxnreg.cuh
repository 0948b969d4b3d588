#pragma once
// What four warps in a row share out among each other: registers, and roles.

// Gives registers back, or takes them, so that each thread of the warpgroup has `count`, a multiple
// of 8 from 24 to 256. Those that take wait for those that give.  setmaxnreg.dec, setmaxnreg.inc
template <int count>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// A value that all lanes of the warp have, as one that the compiler knows to be such: what is
// computed from it then takes no registers of the lanes.
__device__ __forceinline__ int warp_uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// True in one lane of the warp, which all of its lanes ask together.  elect.sync
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}
