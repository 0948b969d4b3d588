#pragma once
// e4m3: 8-bit floating point with 4 exponent and 3 mantissa bits. The largest value is 448, the
// smallest normal 2^-6, the smallest subnormal 2^-9. The format has NaN but no infinity.

struct E4m3 {
  unsigned char bits;
};

// Rounds four floats to nearest even and packs them, `a` in the lowest bits. Values above 448 and
// infinity become 448; NaN stays NaN.  PTX: cvt.rn.satfinite.e4m3x2.f32, from sm_89 on
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
