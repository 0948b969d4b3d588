#pragma once
// e4m3: numbers of 8 bits, four of exponent and three of mantissa. The largest is 448, the smallest
// normal one 2^-6, the smallest subnormal 2^-9. There is NaN, but no infinity.

struct E4m3 {
  unsigned char bits;
};

// Four floats rounded to nearest, ties to even, the first in the lowest bits. Numbers above 448,
// also infinity, become 448; NaN stays.  cvt.rn.satfinite.e4m3x2.f32, from sm_89 on
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
  unsigned four;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}
