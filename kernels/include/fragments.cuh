#pragma once
// The rows of S and O that a warp owns, in the fragments of mma.cuh, and their softmax. A lane
// holds a quarter of two rows in each 16, so two shuffles reach all of a row.

#include <mask.cuh>
#include <mma.cuh>
#include <tensor.cuh>
#include <warp.cuh>

constexpr int step = 16;                      // rows, keys and depth of a product
constexpr int width = cdiv(dv, step) * step;  // of O, filled up with zeros
constexpr float log2e = 1.44269504f;

// A warp's part of S or O: products of 16 rows and 8 columns.
template <int columns>
using Fragments = float[Wr / step][columns / 8][4];

// What a thread knows of the two rows that it holds in each 16.
struct Rows {
  int first, N, diagonal, lower;
  float maximum[Wr / step][2], sum[Wr / step][2];

  __device__ __forceinline__ int row(int i, int half) const { return first + i * step + half * 8; }
  __device__ __forceinline__ bool sees(int i, int half, int key) const {
    return sees_key(row(i, half), key, N, diagonal, lower);
  }
};

// S becomes P = 2^((S - maximum) * scale2); O and the sums are rescaled to the new maximum.
template <bool masked>
__device__ __forceinline__ void softmax(Fragments<Bc>& S, Fragments<width>& O, Rows& rows,
                                        int first_key, float scale2, int lane) {
#pragma unroll
  for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = rows.maximum[i][half];
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = S[i][n][2 * half + e];
          const int key = first_key + n * 8 + 2 * (lane % 4) + e;
          if (masked && !rows.sees(i, half, key)) score = -infinity;
          largest = fmax(largest, score);
        }
      }
      largest = fmax(largest, __shfl_xor_sync(full_warp, largest, 1));
      largest = fmax(largest, __shfl_xor_sync(full_warp, largest, 2));
      // Before any finite score exponents are relative to 0: -infinity - -infinity would be NaN.
      const float origin = largest == -infinity ? 0.0f : largest * scale2;
      const float factor = exp2f(rows.maximum[i][half] * scale2 - origin);
      rows.maximum[i][half] = largest;
      float sum = rows.sum[i][half] * factor;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = S[i][n][2 * half + e];
          score = exp2f(score * scale2 - origin);
          sum += score;
        }
      }
      rows.sum[i][half] = sum;
#pragma unroll
      for (int n = 0; n < width / 8; ++n) {
        O[i][n][2 * half] *= factor;
        O[i][n][2 * half + 1] *= factor;
      }
    }
  }
}

// O / sum, and the logarithms of the sums.
__device__ __forceinline__ void store_rows(const Fragments<width>& O, const Rows& rows,
                                           Tensor<scalar> out, Tensor<real> lse, int batch,
                                           int head, int M, float scale, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const int row = rows.row(i / 2, i % 2);
    float sum = rows.sum[i / 2][i % 2];
    sum += __shfl_xor_sync(full_warp, sum, 1);
    sum += __shfl_xor_sync(full_warp, sum, 2);
    if (row >= M) continue;
    const float inverse = sum == 0 ? 0.0f : 1 / sum;
    if (lane % 4 == 0) *lse.row(batch, head, row) = rows.maximum[i / 2][i % 2] * scale + log(sum);
    scalar* to = out.row(batch, head, row);
#pragma unroll
    for (int j = 0; j < width / 4; ++j) {
      const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
      if (col < dv) to[col] = scalar(O[i / 2][j / 2][i % 2 * 2 + j % 2] * inverse);
    }
  }
}
