#pragma once
// e4m3: 8-bit numbers with four bits of exponent and three of mantissa. The largest is 448, the
// smallest normal one 2^-6, the smallest subnormal one 2^-9. There is NaN, but no infinity.

struct E4m3 {
  unsigned char bits;
};

// Rounds four floats to nearest, ties to even, the first in the lowest bits. Numbers above 448 and
// infinity become 448; NaN stays NaN.  cvt.rn.satfinite.e4m3x2.f32, from sm_89 on
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
