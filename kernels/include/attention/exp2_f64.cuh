#pragma once
// Computes 2^x in double for the softmax. This overloads exp2f, which other headers call, so a
// kernel includes this header first. With x = n + u, an integer n and |u| <= 1/2, a polynomial
// yields 2^u with a relative error of 1.2 * 2^-53, and n is added to its exponent. Results below
// 2^-1021 become 0. The result is 0 for -infinity, and NaN for NaN.

__device__ __forceinline__ double exp2f(double x) {
  constexpr double coefficients[] = {
      0x1.e9ec20ad87111p-32, 0x1.e60640a3f3efbp-28, 0x1.b524ebd0ad040p-24, 0x1.62bfd476c729fp-20,
      0x1.ffcbfc6da72aep-17, 0x1.43091309701a7p-13, 0x1.5d87fe78a3f9bp-10, 0x1.3b2ab6fba1dd9p-7,
      0x1.c6b08d704a0c6p-5,  0x1.ebfbdff82c598p-3,  0x1.62e42fefa39efp-1,  1.0};
  constexpr double magic = 0x1.8p52;  // adding it rounds a number to an integer
  x = x < -1100.0 ? -1100.0 : x;      // NaN stays NaN
  const double shifted = x + magic, u = x - (shifted - magic);
  const int n = __double2loint(shifted);
  double y = 0;
#pragma unroll
  for (int i = 0; i < 12; ++i) y = fma(y, u, coefficients[i]);
  const int kept = n < -1021 ? 0 : -1;  // branch-free, so that exponentials overlap
  return __hiloint2double(int(__double2hiint(y) + (unsigned(n) << 20)) & kept,
                          __double2loint(y) & kept);
}
