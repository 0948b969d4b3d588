#pragma once
// The rows of S and O that a warp owns, in the fragments of mma.cuh, and their softmax. A lane
// holds a quarter of two rows in each 16, so two shuffles reach all of a row.

#include <ptx/opaque.cuh>
#include <attention/mask.cuh>
#include <ptx/mma.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr int step = 16;                      // rows, keys and depth of a product
constexpr int width = cdiv(dv, step) * step;  // of O, filled up with zeros
constexpr float largest_float = 3.40282347e38f;

// A warp's part of S or O: products of 16 rows and 8 columns.
template <int columns>
using Fragments = float[Wr / step][columns / 8][4];

// The same as one array, as the products of wgmma.cuh take it.
template <int blocks>
__device__ __forceinline__ float (&flat(float (&fragments)[1][blocks][4]))
    [blocks * 4] { return reinterpret_cast<float (&)[blocks * 4]>(fragments); }

// What a thread knows of the two rows that it holds in each 16. Rows are those of `pack_gqa` query
// heads, which share a head of K and V: row r is query r / pack_gqa of head r % pack_gqa. Scores
// are multiplied by scale2, so that weights are powers of two. A maximum begins with the lowest
// finite number: -infinity would make NaN of a row whose scores are all masked.
struct Rows {
  int first, N, causal_offset, window_offset;
  float scale2, maximum[Wr / step][2], sum[Wr / step][2];

  __device__ __forceinline__ Rows(int first, int N, int causal_offset, int window_offset,
                                  float scale)
      : first(first),
        N(N),
        causal_offset(causal_offset),
        window_offset(window_offset),
        scale2(scale * log2e),
        sum() {
    for (int i = 0; i < 2 * (Wr / step); ++i) maximum[i / 2][i % 2] = -largest_float;
  }

  __device__ __forceinline__ int row(int i, int half) const {
    return opaque(first) + i * step + half * 8;
  }
  __device__ __forceinline__ bool sees(int i, int half, int key) const {
    return sees_key(row(i, half) / pack_gqa, key, N, causal_offset, window_offset);
  }
  __device__ __forceinline__ void scale(const float (&factor)[Wr / step][2]) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) sum[i / 2][i % 2] *= factor[i / 2][i % 2];
  }
  __device__ __forceinline__ void add(const float (&more)[Wr / step][2]) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) sum[i / 2][i % 2] += more[i / 2][i % 2];
  }
};

// The maxima of a tile's scores in each row, for all lanes; masked scores become -infinity. Four of
// them are found side by side, for each waits for the one before: where a warp owns 16 rows, even
// and odd keys of a row.
template <bool masked>
__device__ __forceinline__ void find_maxima(Fragments<Bc>& S, const Rows& rows, int first_key,
                                            int lane, float (&maximum)[Wr / step][2]) {
  constexpr int parts = Wr == step ? 2 : 1;
  float part[Wr / step][2][parts];
#pragma unroll
  for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first_key + n * 8 + 2 * (lane % 4) + e % 2;
        if (masked && !rows.sees(i, e / 2, key)) S[i][n][e] = -infinity;
        float& x = part[i][e / 2][e % parts];
        x = n * 8 + e % 2 < parts ? S[i][n][e] : fmax(x, S[i][n][e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    float& x = maximum[i / 2][i % 2];
    x = part[i / 2][i % 2][0];
    if constexpr (parts == 2) x = fmax(opaque(x), opaque(part[i / 2][i % 2][1]));
    x = fmax(x, __shfl_xor_sync(full_warp, x, 1));
    x = fmax(x, __shfl_xor_sync(full_warp, x, 2));
  }
}

// Takes a tile of scores into the maxima, and tells the factors by which that lowers what was
// summed before, and whether the warp has one other than 1. A maximum that is exceeded by no more
// than `slack` may stay: weights are then up to 2^slack, and what they are divided by is as much
// larger. Of `whole` maxima, rounded up, all factors are powers of two, by which nothing is
// rounded.
template <bool masked, int slack = 0, bool whole = false>
__device__ __forceinline__ bool raise_maxima(Fragments<Bc>& S, Rows& rows, int first_key, int lane,
                                             float (&factor)[Wr / step][2]) {
  float maximum[Wr / step][2];
  find_maxima<masked>(S, rows, first_key, lane, maximum);
  bool risen = false;
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const float before = rows.maximum[i / 2][i % 2];
    float now = fmax(before, maximum[i / 2][i % 2] * rows.scale2);
    if (slack > 0 && now <= before + slack) now = before;
    if (whole) now = ceil(now);
    factor[i / 2][i % 2] = exp2f(before - now);
    risen |= now != before;
    rows.maximum[i / 2][i % 2] = now;
  }
  return __any_sync(full_warp, risen);
}

__device__ __forceinline__ void scale_rows(Fragments<width>& O,
                                           const float (&factor)[Wr / step][2]) {
#pragma unroll
  for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
    for (int n = 0; n < width / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[i][n][e] *= factor[i][e / 2];
    }
  }
}

// Takes a tile of scores into the maxima. Where a row of the warp has a new one, O and the sums are
// rescaled to it.
template <bool masked>
__device__ __forceinline__ void rescale(Fragments<Bc>& S, Fragments<width>& O, Rows& rows,
                                        int first_key, int lane) {
  float factor[Wr / step][2];
  if (!raise_maxima<masked>(S, rows, first_key, lane, factor)) return;
  rows.scale(factor);
  scale_rows(O, factor);
}

// S becomes P = 2^(S * scale2 - maximum) for the 8 keys in column n of the fragments.
__device__ __forceinline__ void exponentiate(Fragments<Bc>& S, int n, const Rows& rows,
                                             float (&sum)[Wr / step][2]) {
#pragma unroll
  for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      S[i][n][e] = exp2f(S[i][n][e] * rows.scale2 - rows.maximum[i][e / 2]);
      sum[i][e / 2] += S[i][n][e];
    }
  }
}

// The same for all keys of the tile. Its sums are added up before they join the others, which
// keeps more of them where there are millions of keys.
__device__ __forceinline__ void exponentiate(Fragments<Bc>& S, Rows& rows) {
  float sum[Wr / step][2] = {};
#pragma unroll
  for (int n = 0; n < Bc / 8; ++n) exponentiate(S, n, rows, sum);
  rows.add(sum);
}

// A tile of scores becomes P, with all that follows from it.
template <bool masked>
__device__ __forceinline__ void softmax(Fragments<Bc>& S, Fragments<width>& O, Rows& rows,
                                        int first_key, int lane) {
  rescale<masked>(S, O, rows, first_key, lane);
  exponentiate(S, rows);
}

// The bits of a number that is wanted, else 0: of such numbers, taken together by |, one is left.
// Compilers would choose an address where it is written as a choice, and put all into memory.
__device__ __forceinline__ unsigned bits_if(bool wanted, float value) {
  return wanted ? __float_as_uint(value) : 0;
}

// O / sum, and the logarithms of the sums, of which each of a row's four lanes computes another.
template <int blocks>
__device__ __forceinline__ void finish_rows(float (&O)[Wr / step][blocks][4], const Rows& rows,
                                            Tensor<real> lse, int batch, int head, int M,
                                            int lane) {
#pragma unroll
  for (int first = 0; first < 2 * (Wr / step); first += 4) {
    unsigned own_sum = 0, own_maximum = 0;
#pragma unroll
    for (int i = first; i < min(first + 4, 2 * (Wr / step)); ++i) {
      float sum = rows.sum[i / 2][i % 2];
      sum += __shfl_xor_sync(full_warp, sum, 1);
      sum += __shfl_xor_sync(full_warp, sum, 2);
      own_sum |= bits_if(lane % 4 == i - first, sum);
      own_maximum |= bits_if(lane % 4 == i - first, rows.maximum[i / 2][i % 2]);
      const float inverse = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
        O[i / 2][n][i % 2 * 2] *= inverse;
        O[i / 2][n][i % 2 * 2 + 1] *= inverse;
      }
    }
    const int own = first + lane % 4, row = rows.row(0, 0) + own * 8;
    if (own < 2 * (Wr / step) && row < M * pack_gqa)
      *lse.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa) =
          __uint_as_float(own_maximum) / log2e + log(__uint_as_float(own_sum));
  }
}

// Each lane writes the elements of O that it holds.
__device__ __forceinline__ void store_rows(const Fragments<width>& O, const Rows& rows,
                                           Tensor<scalar> out, int batch, int head, int M,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const int row = rows.row(i / 2, i % 2);
    if (row >= M * pack_gqa) continue;
    scalar* to = out.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa);
#pragma unroll
    for (int j = 0; j < width / 4; ++j) {
      const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
      if (col < dv) to[col] = scalar(O[i / 2][j / 2][i % 2 * 2 + j % 2]);
    }
  }
}
