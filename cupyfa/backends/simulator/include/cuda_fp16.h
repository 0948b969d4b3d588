#pragma once
// __half for the CPU: 16 bits, converted by arithmetic on them, computed with as float.
//
// Operations round to nearest, ties to even, as on the device. Rounding to float on the way does
// no harm: its 24 bits are twice those of a half and two more, which is enough.
#include <simulator.h>

namespace simulator {

inline unsigned short half_bits(float value) {
  unsigned bits = bit_cast<unsigned>(value);
  unsigned sign = bits >> 16 & 0x8000;
  unsigned magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {  // NaN stays NaN, with the top of its payload
    return static_cast<unsigned short>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  }
  if (magnitude >= 0x477ff000) return static_cast<unsigned short>(sign | 0x7c00);
  if (magnitude < 0x38800000) {
    // Below the smallest normal: adding 0.5 leaves the subnormal's bits at the float's end.
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
  // Scaling up by 2^112 moves the exponent, and makes normal numbers of the subnormal ones.
  float value = bit_cast<float>(magnitude << 13) * 0x1p112f;
  return bit_cast<float>(sign | bit_cast<unsigned>(value));
}

// To float such that a second rounding, to half or bfloat16, gives what one rounding would:
// towards the odd neighbour if inexact.
inline float round_to_odd(double value) {
  float rounded = static_cast<float>(value);
  double back = rounded;
  unsigned bits = bit_cast<unsigned>(rounded);
  if (back == value || back != back || (bits & 1) != 0) return rounded;
  if (isinf(rounded)) return rounded;
  bool away = fabs(back) > fabs(value);
  return bit_cast<float>(away ? bits - 1 : bits + 1);
}

// a + b, rounded to odd.
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

struct __half {
  unsigned short bits;

  __half() = default;
  __half(__half_raw raw) : bits(raw.x) {}
  __half(float value) : bits(simulator::half_bits(value)) {}
  __half(double value) : bits(simulator::half_bits(simulator::round_to_odd(value))) {}
  __half(int value) : __half(static_cast<double>(value)) {}
  __half(unsigned value) : __half(static_cast<double>(value)) {}
  __half(short value) : __half(static_cast<float>(value)) {}
  __half(unsigned short value) : __half(static_cast<float>(value)) {}
  __half(long long value) : __half(static_cast<double>(value)) {}
  __half(unsigned long long value) : __half(static_cast<double>(value)) {}

  operator float() const { return simulator::half_value(bits); }
  operator __half_raw() const { return {bits}; }
};
typedef __half half;

struct alignas(4) __half2 {
  __half x, y;

  __half2() = default;
  __half2(__half low, __half high) : x(low), y(high) {}
};
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

inline __half __hadd(__half a, __half b) {
  return __half(__half2float(a) + __half2float(b));
}
inline __half __hsub(__half a, __half b) {
  return __half(__half2float(a) - __half2float(b));
}
inline __half __hmul(__half a, __half b) {
  return __half(__half2float(a) * __half2float(b));
}
inline __half __hdiv(__half a, __half b) {
  return __half(__half2float(a) / __half2float(b));
}
inline __half __hneg(__half a) {
  return __ushort_as_half(static_cast<unsigned short>(a.bits ^ 0x8000));
}
inline __half __habs(__half a) {
  return __ushort_as_half(static_cast<unsigned short>(a.bits & 0x7fff));
}
// The product is exact in double; of the sum, rounding to odd keeps what decides.
inline __half __hfma(__half a, __half b, __half c) {
  double product = static_cast<double>(__half2float(a)) * static_cast<double>(__half2float(b));
  return __half(simulator::add_to_odd(product, static_cast<double>(__half2float(c))));
}

inline __half operator+(const __half& a, const __half& b) {
  return __hadd(a, b);
}
inline __half operator-(const __half& a, const __half& b) {
  return __hsub(a, b);
}
inline __half operator*(const __half& a, const __half& b) {
  return __hmul(a, b);
}
inline __half operator/(const __half& a, const __half& b) {
  return __hdiv(a, b);
}
inline __half operator-(const __half& a) {
  return __hneg(a);
}
inline __half& operator+=(__half& a, const __half& b) {
  return a = a + b;
}
inline __half& operator-=(__half& a, const __half& b) {
  return a = a - b;
}
inline __half& operator*=(__half& a, const __half& b) {
  return a = a * b;
}
inline __half& operator/=(__half& a, const __half& b) {
  return a = a / b;
}
inline bool operator==(const __half& a, const __half& b) {
  return __half2float(a) == __half2float(b);
}
inline bool operator!=(const __half& a, const __half& b) {
  return !(a == b);
}
inline bool operator<(const __half& a, const __half& b) {
  return __half2float(a) < __half2float(b);
}
inline bool operator>(const __half& a, const __half& b) {
  return b < a;
}
inline bool operator<=(const __half& a, const __half& b) {
  return __half2float(a) <= __half2float(b);
}
inline bool operator>=(const __half& a, const __half& b) {
  return b <= a;
}

inline bool __heq(__half a, __half b) {
  return a == b;
}
inline bool __hlt(__half a, __half b) {
  return a < b;
}
inline bool __hgt(__half a, __half b) {
  return a > b;
}
inline bool __hisnan(__half a) {
  return isnan(__half2float(a));
}
inline __half __hmax(__half a, __half b) {
  return __half(fmaxf(__half2float(a), __half2float(b)));
}
inline __half __hmin(__half a, __half b) {
  return __half(fminf(__half2float(a), __half2float(b)));
}
inline __half hexp(__half a) {
  return __half(expf(__half2float(a)));
}
inline __half hexp2(__half a) {
  return __half(exp2f(__half2float(a)));
}
inline __half hlog(__half a) {
  return __half(logf(__half2float(a)));
}
inline __half hsqrt(__half a) {
  return __half(sqrtf(__half2float(a)));
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
inline float __low2float(__half2 pair) {
  return __half2float(pair.x);
}
inline float __high2float(__half2 pair) {
  return __half2float(pair.y);
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
inline __half2 __hadd2(__half2 a, __half2 b) {
  return __half2(a.x + b.x, a.y + b.y);
}
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __half2(a.x - b.x, a.y - b.y);
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  return __half2(a.x * b.x, a.y * b.y);
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __half2 operator+(const __half2& a, const __half2& b) {
  return __hadd2(a, b);
}
inline __half2 operator-(const __half2& a, const __half2& b) {
  return __hsub2(a, b);
}
inline __half2 operator*(const __half2& a, const __half2& b) {
  return __hmul2(a, b);
}
