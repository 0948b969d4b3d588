#pragma once
// A weight of the softmax from its score and the row's lse.

#include <tile/math.cuh>

// Whether an exponent of two is so large that its rounding counts: half an ulp is 4 from 2^26 on.
__device__ __forceinline__ bool is_huge(real exponent) {
  return !(fabs(exponent) < (sizeof(real) == 8 ? real(1ll << 55) : real(1 << 26)));
}

// P = exp(score - lse). The rounding of huge numbers may leave a score above lse; P is 1 then.
__device__ __forceinline__ real weight_of(real score, real lse) {
  const real below = score - lse, most = is_huge(lse * log2e) ? real(0) : real(infinity);
  return exp(below > most ? most : below);
}
