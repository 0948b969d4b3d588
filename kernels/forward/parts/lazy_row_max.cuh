#pragma once
// Lazy row maxima of a warp's 16 rows: each lane compares its own scores with the row maximum.
// Lanes exchange their maxima only in the few tiles where a score exceeds it by more than `slack`.
#include <attention/row_maxima.cuh>
#include <timeline.cuh>

// Sets the scores of masked keys to -infinity.
template <int n>
__device__ __forceinline__ void hide_masked(real (&S)[1][n][4], const Rows<step>& rows,
                                            int first_key) {
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) {
    const int key = first_key + i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2;
    if (!rows.in_reach(0, i % 4 / 2, key)) S[0][i / 4][i % 4] = -infinity;
  }
}

// Finds the lane's largest score per row, with separate maxima of even and odd keys until the end.
template <int n>
__device__ __forceinline__ void find_own_maxima(const real (&S)[1][n][4], real (&maximum)[2]) {
  const timeline::Phase phase(timeline::softmax, n * 4);
  real part[2][2];
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) {
    real& x = part[i % 4 / 2][i % 2];
    x = i < 4 ? S[0][0][i] : fmax(x, S[0][i / 4][i % 4]);
  }
  for (int half = 0; half < 2; ++half)
    maximum[half] = fmax(opaque(part[half][0]), opaque(part[half][1]));
}

// Raises the row maxima that `own` exceeds by more than `slack`. Returns false if no lane has such
// a row; otherwise sets the factors that rescale previous sums.
__device__ __forceinline__ bool raise_exceeded(const real (&own)[2], Rows<step>& rows,
                                               real (&factor)[1][2], real slack) {
  bool exceeds = false;
  for (int half = 0; half < 2; ++half) rows.raise_row_max_to(half, own[half], rows.scale2);
  for (int half = 0; half < 2; ++half)
    exceeds |= rows.exponent_of(own[half]) > rows.maximum[0][half] + slack;
  if (!__any_sync(full_warp, exceeds)) return false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    real all = fmax(own[half], __shfl_xor_sync(full_warp, own[half], 1));
    all = fmax(all, __shfl_xor_sync(full_warp, all, 2));
    const real before = rows.maximum[0][half];
    real now = fmax(before, rows.exponent_of(all));
    if (now <= before + slack) now = before;
    factor[0][half] = exp2f(before - now);
    rows.maximum[0][half] = now;
  }
  rows.scale(factor);
  return true;
}
