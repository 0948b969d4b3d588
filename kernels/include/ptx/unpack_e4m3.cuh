#pragma once
// Unpacks e4m3 into operands of 16-bit tensor-core products.

#include <ptx/e4m3.cuh>
#include <ptx/pack.cuh>

// Converts four e4m3 numbers exactly to two pairs of 16-bit numbers, the first number in the lower
// bits. Converts to bfloat16 by way of float.  PTX: cvt.rn.f16x2.e4m3x2, from sm_89 on
template <class T>
__device__ __forceinline__ void unpack_e4m3(unsigned four, unsigned& first, unsigned& second) {
  asm("{.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(first), "=r"(second)
      : "r"(four));
  if constexpr (!is_half<T>) {
    for (unsigned* pair : {&first, &second}) {
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(*pair));
      *pair = pack<T>(x.x, x.y);
    }
  }
}

__device__ __forceinline__ float e4m3_value(E4m3 x) {
  unsigned pair, none;
  unpack_e4m3<__half>(x.bits, pair, none);
  return __low2float(reinterpret_cast<const __half2&>(pair));
}

// Swaps the two middle bytes.  PTX: prmt.b32
__device__ __forceinline__ unsigned swap_middle(unsigned four) {
  return __byte_perm(four, 0, 0x3120);
}
