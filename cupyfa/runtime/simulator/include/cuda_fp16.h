#pragma once
// __half for the CPU: 16 bits, converted by integer arithmetic, with arithmetic in float.
//
// Operations round to nearest even, as on a device. Rounding to float first is harmless, because
// the 24 bits of a float are twice the 11 bits of a half plus two.
#include <simulator.h>

namespace simulator {

inline unsigned short half_bits(float value) {
  unsigned bits = bit_cast<unsigned>(value);
  unsigned sign = bits >> 16 & 0x8000;
  unsigned magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {  // NaN keeps the top of its payload
    return static_cast<unsigned short>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  }
  if (magnitude >= 0x477ff000) return static_cast<unsigned short>(sign | 0x7c00);
  if (magnitude < 0x38800000) {
    // Subnormal results: adding 0.5 rounds to the bits of the subnormal in the float's low bits.
    float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<unsigned short>(sign | (bit_cast<unsigned>(shifted) - 0x3f000000));
  }
  unsigned odd = magnitude >> 13 & 1;
  unsigned rounded = magnitude - 0x38000000 + 0xfff + odd;
  return static_cast<unsigned short>(sign | rounded >> 13);
}

inline float half_value(unsigned short bits) {
  unsigned sign = static_cast<unsigned>(bits & 0x8000) << 16;
  unsigned magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Scaling by 2^112 corrects the exponent and normalises subnormal numbers.
  float value = bit_cast<float>(magnitude << 13) * 0x1p112f;
  return bit_cast<float>(sign | bit_cast<unsigned>(value));
}

// Rounds to float; an inexact value becomes the neighbour whose last bit is odd. A second rounding,
// to half or bfloat16, then returns the correctly rounded value.
inline float round_to_odd(double value) {
  float rounded = static_cast<float>(value);
  double back = rounded;
  unsigned bits = bit_cast<unsigned>(rounded);
  if (back == value || back != back || (bits & 1) != 0) return rounded;
  if (isinf(rounded)) return rounded;
  bool away = fabs(back) > fabs(value);
  return bit_cast<float>(away ? bits - 1 : bits + 1);
}

// Returns a + b, rounded to odd.
inline double add_to_odd(double a, double b) {
  double sum = a + b;
  double b_part = sum - a;
  double lost = (a - (sum - b_part)) + (b - b_part);
  long long bits = bit_cast<long long>(sum);
  if (!isfinite(sum) || lost == 0.0 || (bits & 1) != 0) return sum;
  return bit_cast<double>((lost > 0.0) == (sum > 0.0) ? bits + 1 : bits - 1);
}

}  // namespace simulator

struct __half_raw {
  unsigned short x;
};

#define NUMBER __half
#define RAW __half_raw
#define PAIR __half2
#define BITS simulator::half_bits
#define VALUE simulator::half_value
#include <sixteen_bits.h>

typedef __half half;
typedef __half2 half2;

inline __half __float2half(float value) {
  return __half(value);
}
inline __half __float2half_rn(float value) {
  return __half(value);
}
inline __half __double2half(double value) {
  return __half(value);
}
inline __half __int2half_rn(int value) {
  return __half(value);
}
inline float __half2float(__half value) {
  return simulator::half_value(value.bits);
}
inline int __half2int_rz(__half value) {
  return static_cast<int>(__half2float(value));
}
inline __half __ushort_as_half(unsigned short bits) {
  return __half(__half_raw{bits});
}
inline unsigned short __half_as_ushort(__half value) {
  return value.bits;
}
inline __half __short_as_half(short bits) {
  return __ushort_as_half(static_cast<unsigned short>(bits));
}
inline short __half_as_short(__half value) {
  return static_cast<short>(value.bits);
}

inline __half2 __halves2half2(__half low, __half high) {
  return __half2(low, high);
}
inline __half2 make_half2(__half low, __half high) {
  return __half2(low, high);
}
inline __half2 __half2half2(__half value) {
  return __half2(value, value);
}
inline __half __low2half(__half2 pair) {
  return pair.x;
}
inline __half __high2half(__half2 pair) {
  return pair.y;
}
inline __half2 __float2half2_rn(float value) {
  return __half2half2(__half(value));
}
inline __half2 __floats2half2_rn(float low, float high) {
  return __half2(__half(low), __half(high));
}
inline __half2 __float22half2_rn(float2 pair) {
  return __floats2half2_rn(pair.x, pair.y);
}
inline float2 __half22float2(__half2 pair) {
  return make_float2(__half2float(pair.x), __half2float(pair.y));
}
