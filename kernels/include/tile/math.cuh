#pragma once
// Constants for which NVRTC has no header, and a division that rounds up.

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);
constexpr real log2e = real(1.4426950408889634), ln2 = real(0.6931471805599453);

// Returns the number of tiles of `size` that cover `count`.
__host__ __device__ constexpr int cdiv(int count, int size) {
  return (count + size - 1) / size;
}
