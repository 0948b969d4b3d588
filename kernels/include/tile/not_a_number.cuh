#pragma once
// NaN as arithmetic makes it: 2^x of doubles (exp2_f64.cuh) counts on the low word, 0.

constexpr real not_a_number = __builtin_bit_cast(double, 0x7ff8000000000000);
