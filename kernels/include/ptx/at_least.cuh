#pragma once
// Compares both halves of a register at a time.

// Returns a mask of the halves of x that are not below those of y. Numbers up to 0x7c00 are
// compared as float16, which has the same order.
__device__ __forceinline__ unsigned halves_at_least(unsigned x, unsigned y) {
  unsigned mask;
  asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
}
