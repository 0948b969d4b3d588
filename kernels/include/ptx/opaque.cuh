#pragma once
// Against registers that fill up with what is rarely needed. Compilers compute what a loop does not
// change before it, and keep it; of a value that they cannot foresee they compute nothing ahead.

// The same number, as one that was not known before.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ long long opaque(long long value) {
  asm volatile("" : "+l"(value));
  return value;
}

// Of maxima, which compilers take in an order of their own otherwise.
__device__ __forceinline__ float opaque(float value) {
  asm("" : "+f"(value));
  return value;
}
