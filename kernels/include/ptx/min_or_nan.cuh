#pragma once
// The smaller of two floats, or NaN if one of them is: fmin would give the other one.

__device__ __forceinline__ float min_or_nan(float x, float y) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
  return smaller;
}
