#pragma once
// Packs 16-bit operands of tensor-core products, two per register.
#include <cuda_fp16.h>
constexpr int step = 16;  // M and K of a 16-bit mma.sync; two products cover 16 keys

template <class T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<__half> = true;

// Rounds two floats to T, the first to the lower bits.  PTX: cvt.rn.f16x2.f32, cvt.rn.bf16x2.f32
template <class T>
__device__ __forceinline__ unsigned pack(float low, float high) {
  if constexpr (is_half<T>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
  }
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
