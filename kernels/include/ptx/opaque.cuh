#pragma once
// A value that the optimiser cannot see through. Nothing is computed from it ahead of a loop, so
// that what is rarely needed takes no registers meanwhile.

__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ long long opaque(long long value) {
  asm volatile("" : "+l"(value));
  return value;
}
// For maxima of two parts: compilers would make one chain of dependent steps of them.
__device__ __forceinline__ float opaque(float value) {
  asm("" : "+f"(value));
  return value;
}
