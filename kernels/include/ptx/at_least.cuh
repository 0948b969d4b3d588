#pragma once
// Returns all ones in each half where x >= y, else zeros. Compares bits up to 0x7c00 as float16,
// which orders them like integers.

__device__ __forceinline__ unsigned halves_at_least(unsigned x, unsigned y) {
  unsigned mask;
  asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
}
