#pragma once
// A value that the optimiser cannot see through. The compiler computes nothing from it ahead of a
// loop, so that what is rarely needed takes no registers meanwhile.

__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ long long opaque(long long value) {
  asm volatile("" : "+l"(value));
  return value;
}
// For maxima of two parts: compilers would turn them into one chain of dependent steps.
__device__ __forceinline__ float opaque(float value) {
  asm("" : "+f"(value));
  return value;
}
