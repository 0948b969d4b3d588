#pragma once
// Sums numbers that many threads add in any order, with the same bits each time: as multiples of a
// power of two, which integers hold exactly. Each element has a separate power, by the largest of
// its numbers: the sums of other elements do not change its error. Where one word would lose many
// small numbers, a second one holds the bits that the first one cuts off. Numbers that are not
// finite set flags instead.

#include <tile/warp.cuh>

struct ExactSums {
  int* exponents;   // of each element: the biased exponent of its largest double, plus 1
  long long* sums;  // [words, elements]
  unsigned* flags;  // 1: infinity, 2: -infinity, 4: NaN has been added
  int bits;         // an element gets fewer than 2^bits numbers

  __device__ __forceinline__ static double power(int exponent) {
    return __builtin_bit_cast(double, (long long)(1023 + exponent) << 52);
  }
  // x * 2^exponent, which may be beyond the powers that a double has.
  __device__ __forceinline__ static double times_power(double x, int exponent) {
    return x * power(exponent / 2) * power(exponent - exponent / 2);
  }
  __device__ __forceinline__ static bool is_finite(double x) { return fabs(x) < infinity; }

  // The number of bits of one number in a word.
  __device__ __forceinline__ int width() const { return 61 - bits; }
  __device__ __forceinline__ int& exponent(long long element) const { return exponents[element]; }
  // Numbers of an element, multiplied by 2^shift, are below 2^width.
  __device__ __forceinline__ int shift(long long element) const {
    return width() + 1023 - exponent(element);
  }
  __device__ __forceinline__ void add_whole(long long place, double x) const {
    if (x != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&sums[place]),
                (unsigned long long)(long long)x);
  }

  __device__ __forceinline__ void note(long long element, double x) const {
    if (x != 0 && is_finite(x))
      atomicMax(&exponent(element), 1 + int(__builtin_bit_cast(unsigned long long, fabs(x)) >> 52));
  }
  // Adds a number, after all numbers have been noted.
  __device__ __forceinline__ void add(long long element, double x) const {
    if (!is_finite(x)) {
      atomicOr(&flags[element], x != x ? 4u : x > 0 ? 1u : 2u);
    } else if (x != 0) {
      const double number = times_power(x, shift(element)),
                   whole = words == 1 ? rint(number) : trunc(number);
      add_whole(element, whole);
      if (words == 2) add_whole(elements + element, rint((number - whole) * power(width())));
    }
  }
  __device__ __forceinline__ double sum(long long element) const {
    const unsigned found = flags[element];
    const double infinite = found == 1 ? infinity : -infinity;
    if (found) return found < 3 ? infinite : infinite - infinite;
    double number = double(sums[element]);
    if (words == 2) number += double(sums[elements + element]) * power(-width());
    return times_power(number, -shift(element));
  }
};

// Sums a lane's consecutive numbers for the same element, in their order.
struct Run {
  long long element = -1;  // none yet
  double sum = 0;

  // Calls body(element, sum) when a run ends.
  template <class Body>
  __device__ __forceinline__ void add(long long to, double x, Body body) {
    if (to != element) {
      if (element >= 0) body(element, sum);
      *this = {to, 0};
    }
    sum += x;
  }
  // Ends the runs of a warp, as a single one if all are of the same element.
  template <class Body>
  __device__ __forceinline__ void end(int lane, Body body) const {
    const unsigned begun = __ballot_sync(full_warp, element >= 0);
    const long long first = __shfl_sync(full_warp, element, max(__ffs(begun) - 1, 0));
    if (__all_sync(full_warp, element < 0 || element == first)) {
      const double of_warp = warp_sum(sum);
      if (lane == 0 && begun) body(first, of_warp);
    } else if (element >= 0) {
      body(element, sum);
    }
  }
};
