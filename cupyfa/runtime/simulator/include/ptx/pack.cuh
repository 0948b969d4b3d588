#pragma once
// Packs 16-bit operands of tensor-core products, two per register.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int step = 16;  // M and K of a 16-bit mma.sync; two products cover 16 keys

template <class T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<__half> = true;

namespace simulator {

template <class T>
inline unsigned short narrow(float value) {
  if constexpr (is_half<T>) {
    return half_bits(value);
  } else {
    return bfloat16_bits(value);
  }
}

}  // namespace simulator

// Rounds two floats to T, the first to the lower bits.
template <class T>
inline unsigned pack(float low, float high) {
  return simulator::narrow<T>(low) | static_cast<unsigned>(simulator::narrow<T>(high)) << 16;
}
