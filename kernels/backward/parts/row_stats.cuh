#pragma once
// What the forward pass left of a row: lse in powers of two, and delta. A row that sees no key has
// infinity and 0, which make its P 0; an lse that is infinite otherwise comes with delta = NaN.

#include <tile/math.cuh>

struct RowStats {
  real lse2, delta;

  __device__ __forceinline__ bool sees_keys() const { return lse2 != infinity || delta != 0; }
};

__device__ __forceinline__ RowStats row_stats(real lse, real delta) {
  if (lse == -infinity) return {infinity, 0};
  return {lse * log2e, delta};
}
