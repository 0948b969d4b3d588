#pragma once
// Constants, for which NVRTC has no header, and a division that rounds up.

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float log2e = 1.44269504f, ln2 = 0.693147181f;

// How many tiles of `size` cover `count`.
__host__ __device__ constexpr int cdiv(int count, int size) {
  return (count + size - 1) / size;
}
