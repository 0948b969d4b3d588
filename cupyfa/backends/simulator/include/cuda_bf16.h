#pragma once
// __nv_bfloat16 for the CPU: the upper half of a float, computed with as float.
//
// Operations round to nearest, ties to even, as on the device.
#include <cuda_fp16.h>

namespace simulator {

inline unsigned short bfloat16_bits(float value) {
  unsigned bits = bit_cast<unsigned>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // the device's one NaN
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float bfloat16_value(unsigned short bits) {
  return bit_cast<float>(static_cast<unsigned>(bits) << 16);
}

}  // namespace simulator

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct __nv_bfloat16 {
  unsigned short bits;

  __nv_bfloat16() = default;
  __nv_bfloat16(__nv_bfloat16_raw raw) : bits(raw.x) {}
  __nv_bfloat16(float value) : bits(simulator::bfloat16_bits(value)) {}
  __nv_bfloat16(double value) : bits(simulator::bfloat16_bits(simulator::round_to_odd(value))) {}
  __nv_bfloat16(int value) : __nv_bfloat16(static_cast<double>(value)) {}
  __nv_bfloat16(unsigned value) : __nv_bfloat16(static_cast<double>(value)) {}
  __nv_bfloat16(short value) : __nv_bfloat16(static_cast<float>(value)) {}
  __nv_bfloat16(unsigned short value) : __nv_bfloat16(static_cast<float>(value)) {}
  __nv_bfloat16(long long value) : __nv_bfloat16(static_cast<double>(value)) {}
  __nv_bfloat16(unsigned long long value) : __nv_bfloat16(static_cast<double>(value)) {}

  operator float() const { return simulator::bfloat16_value(bits); }
  operator __nv_bfloat16_raw() const { return {bits}; }
};
typedef __nv_bfloat16 nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;

  __nv_bfloat162() = default;
  __nv_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) : x(low), y(high) {}
};
typedef __nv_bfloat162 nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float value) {
  return __nv_bfloat16(value);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return __nv_bfloat16(value);
}
inline __nv_bfloat16 __double2bfloat16(double value) {
  return __nv_bfloat16(value);
}
inline __nv_bfloat16 __int2bfloat16_rn(int value) {
  return __nv_bfloat16(value);
}
inline float __bfloat162float(__nv_bfloat16 value) {
  return simulator::bfloat16_value(value.bits);
}
inline int __bfloat162int_rz(__nv_bfloat16 value) {
  return static_cast<int>(__bfloat162float(value));
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return __nv_bfloat16(__nv_bfloat16_raw{bits});
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
  return value.bits;
}
inline __nv_bfloat16 __short_as_bfloat16(short bits) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
}
inline short __bfloat16_as_short(__nv_bfloat16 value) {
  return static_cast<short>(value.bits);
}

inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(__bfloat162float(a) + __bfloat162float(b));
}
inline __nv_bfloat16 __hsub(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(__bfloat162float(a) - __bfloat162float(b));
}
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(__bfloat162float(a) * __bfloat162float(b));
}
inline __nv_bfloat16 __hdiv(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(__bfloat162float(a) / __bfloat162float(b));
}
inline __nv_bfloat16 __hneg(__nv_bfloat16 a) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(a.bits ^ 0x8000));
}
inline __nv_bfloat16 __habs(__nv_bfloat16 a) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(a.bits & 0x7fff));
}
// The product is exact in double; of the sum, rounding to odd keeps what decides.
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  double product =
      static_cast<double>(__bfloat162float(a)) * static_cast<double>(__bfloat162float(b));
  return __nv_bfloat16(simulator::add_to_odd(product, static_cast<double>(__bfloat162float(c))));
}

inline __nv_bfloat16 operator+(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return __hadd(a, b);
}
inline __nv_bfloat16 operator-(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return __hsub(a, b);
}
inline __nv_bfloat16 operator*(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return __hmul(a, b);
}
inline __nv_bfloat16 operator/(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return __hdiv(a, b);
}
inline __nv_bfloat16 operator-(const __nv_bfloat16& a) {
  return __hneg(a);
}
inline __nv_bfloat16& operator+=(__nv_bfloat16& a, const __nv_bfloat16& b) {
  return a = a + b;
}
inline __nv_bfloat16& operator-=(__nv_bfloat16& a, const __nv_bfloat16& b) {
  return a = a - b;
}
inline __nv_bfloat16& operator*=(__nv_bfloat16& a, const __nv_bfloat16& b) {
  return a = a * b;
}
inline __nv_bfloat16& operator/=(__nv_bfloat16& a, const __nv_bfloat16& b) {
  return a = a / b;
}
inline bool operator==(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return __bfloat162float(a) == __bfloat162float(b);
}
inline bool operator!=(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return !(a == b);
}
inline bool operator<(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return __bfloat162float(a) < __bfloat162float(b);
}
inline bool operator>(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return b < a;
}
inline bool operator<=(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return __bfloat162float(a) <= __bfloat162float(b);
}
inline bool operator>=(const __nv_bfloat16& a, const __nv_bfloat16& b) {
  return b <= a;
}

inline bool __heq(__nv_bfloat16 a, __nv_bfloat16 b) {
  return a == b;
}
inline bool __hlt(__nv_bfloat16 a, __nv_bfloat16 b) {
  return a < b;
}
inline bool __hgt(__nv_bfloat16 a, __nv_bfloat16 b) {
  return a > b;
}
inline bool __hisnan(__nv_bfloat16 a) {
  return isnan(__bfloat162float(a));
}
inline __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(fmaxf(__bfloat162float(a), __bfloat162float(b)));
}
inline __nv_bfloat16 __hmin(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __nv_bfloat16(fminf(__bfloat162float(a), __bfloat162float(b)));
}
inline __nv_bfloat16 hexp(__nv_bfloat16 a) {
  return __nv_bfloat16(expf(__bfloat162float(a)));
}
inline __nv_bfloat16 hexp2(__nv_bfloat16 a) {
  return __nv_bfloat16(exp2f(__bfloat162float(a)));
}
inline __nv_bfloat16 hlog(__nv_bfloat16 a) {
  return __nv_bfloat16(logf(__bfloat162float(a)));
}
inline __nv_bfloat16 hsqrt(__nv_bfloat16 a) {
  return __nv_bfloat16(sqrtf(__bfloat162float(a)));
}

inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) {
  return __nv_bfloat162(low, high);
}
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) {
  return __nv_bfloat162(low, high);
}
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) {
  return __nv_bfloat162(value, value);
}
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) {
  return pair.x;
}
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) {
  return pair.y;
}
inline float __low2float(__nv_bfloat162 pair) {
  return __bfloat162float(pair.x);
}
inline float __high2float(__nv_bfloat162 pair) {
  return __bfloat162float(pair.y);
}
inline __nv_bfloat162 __float2bfloat162_rn(float value) {
  return __bfloat162bfloat162(__nv_bfloat16(value));
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return __nv_bfloat162(__nv_bfloat16(low), __nv_bfloat16(high));
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) {
  return __floats2bfloat162_rn(pair.x, pair.y);
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return make_float2(__bfloat162float(pair.x), __bfloat162float(pair.y));
}
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __nv_bfloat162(a.x + b.x, a.y + b.y);
}
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __nv_bfloat162(a.x - b.x, a.y - b.y);
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __nv_bfloat162(a.x * b.x, a.y * b.y);
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __nv_bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __nv_bfloat162 operator+(const __nv_bfloat162& a, const __nv_bfloat162& b) {
  return __hadd2(a, b);
}
inline __nv_bfloat162 operator-(const __nv_bfloat162& a, const __nv_bfloat162& b) {
  return __hsub2(a, b);
}
inline __nv_bfloat162 operator*(const __nv_bfloat162& a, const __nv_bfloat162& b) {
  return __hmul2(a, b);
}
