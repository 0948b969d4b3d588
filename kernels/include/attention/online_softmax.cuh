#pragma once
// The online softmax of one row: scores arrive in pieces, and what was summed under an old maximum
// is rescaled when a larger one turns up. (Milakov and Gimelshein, 2018, arXiv:1805.02867)

#include <tile/math.cuh>

struct OnlineSoftmax {
  real maximum = -infinity;  // of the scores so far
  real sum = 0;              // of exp(score - maximum)

  // What exponents are taken relative to. Before any finite score that is 0, not -infinity:
  // -infinity - -infinity would be NaN.
  __device__ __forceinline__ real origin() const { return maximum == -infinity ? 0 : maximum; }

  // exp(score), relative to the maximum. NaN stays NaN.
  __device__ __forceinline__ real weight(real score) const { return exp(score - origin()); }

  // Makes room for scores up to `largest`; returns the factor for all that was summed before.
  __device__ __forceinline__ real raise(real largest) {
    const real old = maximum;
    maximum = fmax(maximum, largest);
    const real factor = exp(old - origin());
    sum *= factor;
    return factor;
  }

  // What to multiply a weighted sum by in the end. A row that sees no key has sum 0 and output 0.
  __device__ __forceinline__ real inverse_sum() const { return sum == 0 ? real(0) : 1 / sum; }

  // The natural logarithm of the sum of exp(score); -infinity if no key was seen.
  __device__ __forceinline__ real lse() const { return maximum + log(sum); }
};
