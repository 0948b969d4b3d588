#pragma once
// Returns the smaller of two floats, or NaN if either is NaN; fmin would drop the NaN.

__device__ __forceinline__ float min_or_nan(float x, float y) {
  if constexpr (__CUDA_ARCH__ >= 800) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
    return smaller;
  } else {
    return y < x || y != y ? y : x;
  }
}
