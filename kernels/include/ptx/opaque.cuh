#pragma once
// Hides a value from the optimiser. The compiler then cannot precompute expressions of the value
// ahead of a loop, where rarely needed results would occupy registers.

__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ long long opaque(long long value) {
  asm volatile("" : "+l"(value));
  return value;
}
// Keeps two partial maxima apart, which compilers would merge into one chain of dependent steps.
__device__ __forceinline__ float opaque(float value) {
  asm("" : "+f"(value));
  return value;
}
