#pragma once
// e4m3: 8-bit floating point with 4 exponent and 3 mantissa bits. The largest value is 448, the
// smallest normal 2^-6, the smallest subnormal 2^-9. The format has NaN but no infinity.
#include <simulator.h>

struct E4m3 {
  unsigned char bits;
};

namespace simulator {

inline unsigned e4m3_bits(float value) {
  unsigned bits = bit_cast<unsigned>(value);
  unsigned sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;          // NaN loses its sign
  if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448
  // Subnormal results: adding 2^14 rounds to a multiple of 2^-9 in the float's low bits.
  if (magnitude < 0x3c800000)
    return sign | (bit_cast<unsigned>(bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000);
  unsigned odd = magnitude >> 20 & 1;
  return sign | (magnitude - 0x3c000000 + 0x7ffff + odd) >> 20;
}

}  // namespace simulator

// Rounds four floats to nearest even and packs them, `a` in the lowest bits. Values above 448 and
// infinity become 448; NaN stays NaN.
inline unsigned pack_e4m3(float a, float b, float c, float d) {
  return simulator::e4m3_bits(a) | simulator::e4m3_bits(b) << 8 | simulator::e4m3_bits(c) << 16 |
         simulator::e4m3_bits(d) << 24;
}
