#pragma once
// The online softmax of one row: scores arrive in tiles, and sums relative to an old maximum are
// rescaled when a larger score arrives. (Milakov and Gimelshein, 2018, arXiv:1805.02867)

#include <attention/row_max.cuh>
#include <tile/math.cuh>

struct OnlineSoftmax : RowMaxima<1> {
  real maximum;  // largest score so far
  real sum;      // sum of p(score)

  __device__ __forceinline__ OnlineSoftmax(real maximum = -infinity, real sum = 0)
      : maximum(maximum), sum(sum) {}

  // Starts with an attention sink; -infinity means no sink, and infinity makes the sum NaN.
  __device__ __forceinline__ void begin_with(real score) {
    if (score == -infinity) return;
    maximum = score;
    sum = score - score + 1;
  }

  // Returns the maximum that exponents are relative to. Before any finite score this is 0, because
  // -infinity - -infinity is NaN.
  __device__ __forceinline__ real origin() const { return maximum == -infinity ? 0 : maximum; }

  // Returns an unnormalised weight, exp(score - origin()). NaN stays NaN.
  __device__ __forceinline__ real p(real score) const { return exp(score - origin()); }

  // Raises the maximum to `largest`; returns the factor that rescales earlier sums.
  __device__ __forceinline__ real raise(real largest) {
    const real old = maximum;
    raise_row_max(0, largest);
    maximum = fmax(maximum, largest);
    const real factor = exp(old - origin());
    sum *= factor;
    return factor;
  }

  // Returns the factor that normalizes O: 0 if no key is visible or all scores are -infinity.
  __device__ __forceinline__ real inverse_sum() const { return sum == 0 ? real(0) : 1 / sum; }

  // Returns the natural logarithm of the sum of exp(score), -infinity if that sum is 0.
  __device__ __forceinline__ real lse() const { return maximum + log(sum); }
};
