#pragma once
// What the forward pass left of a row: lse in powers of two, and delta. A row that sees no key has
// infinity and 0, which make its P 0. An lse that is too large for exponents relative to it, or not
// finite, becomes NaN: that shows in all sums, which are computed again from LseAndDelta.

#include <attention/weight.cuh>
#include <tile/not_a_number.cuh>

struct RowStats {
  real lse2, delta;
};

__device__ __forceinline__ real exponent_of_lse(real lse) {
  if (lse == -infinity) return infinity;
  return is_huge(lse * log2e) ? not_a_number : lse * log2e;
}
__device__ __forceinline__ RowStats row_stats(real lse, real delta) {
  return {exponent_of_lse(lse), lse == -infinity ? real(0) : delta};
}

// The same as they are.
struct LseAndDelta {
  real lse, delta;

  __device__ __forceinline__ bool sees_keys() const { return lse != -infinity; }
};
