#pragma once
// Unpacks e4m3 into operands of 16-bit tensor-core products.

#include <ptx/e4m3.cuh>
#include <ptx/pack.cuh>
#include <simulator.h>

inline float e4m3_value(E4m3 x) {
  unsigned exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  float value = exponent == 0 ? float(mantissa) * 0x1p-9f
                              : simulator::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
  if ((x.bits & 0x7f) == 0x7f) value = simulator::bit_cast<float>(0x7fc00000u);
  return x.bits & 0x80 ? -value : value;
}

// Converts four e4m3 numbers exactly to two pairs of 16-bit numbers, the first in the lower bits.
template <class T>
inline void unpack_e4m3(unsigned four, unsigned& first, unsigned& second) {
  float value[4];
  for (int i = 0; i < 4; ++i)
    value[i] = e4m3_value({static_cast<unsigned char>(four >> 8 * i & 0xff)});
  first = pack<T>(value[0], value[1]), second = pack<T>(value[2], value[3]);
}

// Swaps the two middle bytes.
inline unsigned swap_middle(unsigned four) {
  return (four & 0xff0000ff) | (four & 0xff00) << 8 | (four & 0xff0000) >> 8;
}
