#pragma once
// Row statistics for gradients with split operands.

#include <backward/parts/split_f32/split_exponents.cuh>

// Statistics of one row: lse * log2(e), delta * 2^60, and the units that scale split products to
// exponents of 2 and to dP * 2^60. A row that sees no key has lse2 = infinity, so that its P is 0.
// A row with a flag or a huge lse has lse2 = NaN, which flags all of its sums.
struct alignas(16) SplitStats {
  float lse2, unit, delta, dO_unit;
};
