#pragma once
// Row statistics for the backward pass: lse2 = lse * log2(e), and delta. A row that sees no key has
// lse2 = infinity and delta = 0, so that its P is 0. A huge lse becomes NaN, which makes the row's
// gradients NaN, so that they are recomputed from RawStats.

#include <attention/weight.cuh>

constexpr real no_exponent = __builtin_bit_cast(double, 0x7ff8000000000000);

struct RowStats {
  real lse2, delta;
};
struct RawStats {
  real lse, delta;
};

__device__ __forceinline__ RowStats row_stats(const RawStats& own) {
  if (own.lse == -infinity) return {infinity, 0};
  return {fabs(own.lse) < huge_lse ? own.lse * log2e : no_exponent, own.delta};
}
