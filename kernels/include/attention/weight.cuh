#pragma once
// Computes P = exp(score - lse), clamped to 1, since rounding may make a score exceed a huge lse.
#include <tile/math.cuh>

constexpr real huge_lse = sizeof(real) == 8 ? 0x1p55 : 0x1p25;  // from here on rounding matters
__device__ __forceinline__ real log_weight(real score, real lse) {
  return fabs(lse) >= huge_lse && score > lse ? real(0) : score - lse;
}
__device__ __forceinline__ real weight_of(real score, real lse) {
  return exp(log_weight(score, lse));
}
