#pragma once
// The statistics of a row from the forward pass: lse in powers of two, and delta. A row that sees
// no key has lse2 = infinity and delta = 0, so that its P is 0. A huge lse becomes NaN, so that its
// sums are computed again from RawStats.

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
