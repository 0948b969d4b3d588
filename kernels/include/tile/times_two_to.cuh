#pragma once
// Returns x * 2^power, in two steps because 2^power itself may be out of range.
#include <tile/powers.cuh>

__device__ __forceinline__ float times_two_to(float x, int power) {
  const int first = max(-252, min(power, 254)) >> 1;
  return x * two_to(first) * two_to(max(-252, min(power, 254)) - first);
}
