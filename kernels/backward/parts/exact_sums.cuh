#pragma once
// Sums that do not depend on the order of additions, so that every run returns the same bits. Terms
// are rounded to integer multiples of a power of two and added as integers. Each element has its
// own power, chosen by its largest term, so that other elements do not affect its error. An
// optional second word holds the bits below the first word. Non-finite terms set flags instead.

#include <tile/warp.cuh>

struct ExactSums {
  int* exponents;   // per element: biased exponent of the largest term, plus 1
  long long* sums;  // [words, elements]
  unsigned* flags;  // per element, kinds of added terms: 1 infinity, 2 -infinity, 4 NaN
  int bits;         // each element receives fewer than 2^bits terms

  __device__ __forceinline__ static double power(int exponent) {
    return __builtin_bit_cast(double, (long long)(1023 + exponent) << 52);
  }
  // Returns x * 2^exponent, even if 2^exponent overflows or underflows.
  __device__ __forceinline__ static double times_power(double x, int exponent) {
    return x * power(exponent / 2) * power(exponent - exponent / 2);
  }
  __device__ __forceinline__ static bool is_finite(double x) { return fabs(x) < infinity; }

  // Returns the number of bits that one term may occupy in a word.
  __device__ __forceinline__ int width() const { return 61 - bits; }
  __device__ __forceinline__ int& exponent(long long element) const { return exponents[element]; }
  // Returns the shift for which the element's terms times 2^shift are below 2^width().
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
  // Adds a term. All terms must have been passed to note() before.
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

// Sums a lane's consecutive terms of the same element, in order.
struct Run {
  long long element = -1;  // none yet
  double sum = 0;

  // Adds x to element `to`. If that begins a new run, calls body(element, sum) for the last run.
  template <class Body>
  __device__ __forceinline__ void add(long long to, double x, Body body) {
    if (to != element) {
      if (element >= 0) body(element, sum);
      *this = {to, 0};
    }
    sum += x;
  }
  // Ends the warp's runs, with a single call of body if all of them belong to the same element.
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
