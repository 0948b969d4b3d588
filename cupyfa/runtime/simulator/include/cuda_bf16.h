#pragma once
// __nv_bfloat16 for the CPU: the upper half of a float, with arithmetic in float.
//
// Operations round to nearest even, as on a device.
#include <cuda_fp16.h>

namespace simulator {

inline unsigned short bfloat16_bits(float value) {
  unsigned bits = bit_cast<unsigned>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // the only NaN that a device returns
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float bfloat16_value(unsigned short bits) {
  return bit_cast<float>(static_cast<unsigned>(bits) << 16);
}

}  // namespace simulator

struct __nv_bfloat16_raw {
  unsigned short x;
};

#define NUMBER __nv_bfloat16
#define RAW __nv_bfloat16_raw
#define PAIR __nv_bfloat162
#define BITS simulator::bfloat16_bits
#define VALUE simulator::bfloat16_value
#include <sixteen_bits.h>

typedef __nv_bfloat16 nv_bfloat16;
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
