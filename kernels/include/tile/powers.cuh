#pragma once
// Returns 2^power for a power from -126 to 127.
__device__ __forceinline__ float two_to(int power) {
  return __uint_as_float(unsigned(power + 127) << 23);
}
