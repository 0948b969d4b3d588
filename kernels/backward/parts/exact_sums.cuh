#pragma once
// Sums of numbers that many threads add in any order, with the same bits each time: as multiples of
// a power of two that is chosen by the largest number, so that 64 bits hold the sum. Numbers that
// are not finite are noted instead.

struct ExactSums {
  unsigned long long* largest;  // of each array the bits of the largest magnitude, as of a double
  long long* sums;
  unsigned* flags;  // 1: infinity, 2: -infinity, 4: NaN has been added
  int bits;         // an element gets fewer than 2^bits numbers

  // The power of two that numbers of an array are multiplied by.
  __device__ __forceinline__ int shift(int array) const {
    const int exponent = int(largest[array] >> 52) - 1022;
    return min(61 - exponent - bits, 1000);
  }
  __device__ __forceinline__ static double power(int exponent) {
    return __builtin_bit_cast(double, (long long)(1023 + exponent) << 52);
  }
  __device__ __forceinline__ static bool is_finite(double x) { return fabs(x) < infinity; }

  __device__ __forceinline__ void note(int array, double x) const {
    if (x != 0 && is_finite(x))
      atomicMax(&largest[array], __builtin_bit_cast(unsigned long long, fabs(x)));
  }
  __device__ __forceinline__ void add(int array, long long element, double x) const {
    if (!is_finite(x))
      atomicOr(&flags[element], x != x ? 4u : x > 0 ? 1u : 2u);
    else if (x != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&sums[element]),
                (unsigned long long)(long long)rint(x * power(shift(array))));
  }
  __device__ __forceinline__ double sum(int array, long long element) const {
    const unsigned found = flags[element];
    const double infinite = found == 1 ? infinity : -infinity;
    if (found) return found < 3 ? infinite : infinite - infinite;
    const int back = -shift(array);
    return double(sums[element]) * power(max(back, -1000) / 2) * power(back - back / 2);
  }
};
