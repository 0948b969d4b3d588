#pragma once
// The rows of S and O that a warp owns, in the fragments of mma.cuh, and their softmax. A lane
// holds a quarter of two rows in each 16, so two shuffles reach all of a row.

#include <attention/extent.cuh>
#include <ptx/mma.cuh>
#include <ptx/opaque.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr float largest_float = 3.40282347e38f;

// A warp's rows of S, P or O: products of 16 rows and 8 columns.
template <int rows, int columns>
using Fragments = float[rows / step][columns / 8][4];

// The same as one array, as the products of wgmma.cuh take it.
template <int blocks>
__device__ __forceinline__ float (&flat(float (&fragments)[1][blocks][4]))
    [blocks * 4] { return reinterpret_cast<float (&)[blocks * 4]>(fragments); }

// The softmax of a warp's Wr rows: the maximum and the sum of the two rows that a lane holds in
// each 16. Exponents are powers of two: scores are multiplied by scale2. Row r is query
// r / pack_gqa of query head r % pack_gqa, of the `pack_gqa` heads that share a head of K and V.
// A maximum begins with the lowest finite number: -infinity would make NaN of a row whose scores
// are all masked.
template <int Wr, int pack_gqa = 1>
struct Rows {
  int first;  // the lane's first row
  Extent extent;
  float scale2, maximum[Wr / step][2], sum[Wr / step][2];

  __device__ __forceinline__ Rows(int first, const Extent& extent, float scale2)
      : first(first), extent(extent), scale2(scale2), sum() {
    for (int i = 0; i < 2 * (Wr / step); ++i) maximum[i / 2][i % 2] = -largest_float;
  }

  __device__ __forceinline__ int row(int i, int half) const {
    return opaque(first) + i * step + half * 8;
  }
  __device__ __forceinline__ bool sees(int i, int half, int key) const {
    return extent.sees(row(i, half) / pack_gqa, key);
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

// The maxima of a tile's scores in each row, for all lanes; masked scores become -infinity. Each
// step of a maximum waits for the one before: where a warp owns 16 rows only, even and odd keys of
// a row have a maximum each.
template <bool masked, int m, int n, int pack_gqa>
__device__ __forceinline__ void find_maxima(float (&S)[m][n][4],
                                            const Rows<m * step, pack_gqa>& rows, int first_key,
                                            int lane, float (&maximum)[m][2]) {
  constexpr int parts = m == 1 ? 2 : 1;
  float part[m][2][parts];
#pragma unroll
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int i = 0; i < m; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first_key + j * 8 + 2 * (lane % 4) + e % 2;
        if (masked && !rows.sees(i, e / 2, key)) S[i][j][e] = -infinity;
        float& x = part[i][e / 2][e % parts];
        x = j * 8 + e % 2 < parts ? S[i][j][e] : fmax(x, S[i][j][e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    float& x = maximum[i / 2][i % 2];
    x = part[i / 2][i % 2][0];
    if constexpr (parts == 2) x = fmax(opaque(x), opaque(part[i / 2][i % 2][1]));
    x = fmax(x, __shfl_xor_sync(full_warp, x, 1));
    x = fmax(x, __shfl_xor_sync(full_warp, x, 2));
  }
}

// Raises the rows' maxima to those of a tile of scores. Sets the factors that rescale what was
// summed before; returns whether one of the warp's factors is not 1. A maximum that is exceeded by
// no more than `slack` may stay: P is then up to 2^slack, and so is its sum. Of `whole` maxima,
// rounded up, all factors are powers of two, which round nothing.
template <bool masked, int slack = 0, bool whole = false, int m, int n, int pack_gqa>
__device__ __forceinline__ bool raise_maxima(float (&S)[m][n][4], Rows<m * step, pack_gqa>& rows,
                                             int first_key, int lane, float (&factor)[m][2]) {
  float maximum[m][2];
  find_maxima<masked>(S, rows, first_key, lane, maximum);
  bool risen = false;
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
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

template <int m, int n>
__device__ __forceinline__ void scale_rows(float (&O)[m][n][4], const float (&factor)[m][2]) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[i][j][e] *= factor[i][e / 2];
    }
  }
}

// Raises the maxima to those of a tile of scores. Where that changes a row of the warp, rescales O
// and the sums.
template <bool masked, int m, int keys, int cols, int pack_gqa>
__device__ __forceinline__ void rescale(float (&S)[m][keys][4], float (&O)[m][cols][4],
                                        Rows<m * step, pack_gqa>& rows, int first_key, int lane) {
  float factor[m][2];
  if (!raise_maxima<masked>(S, rows, first_key, lane, factor)) return;
  rows.scale(factor);
  scale_rows(O, factor);
}

// S becomes P = 2^(S * scale2 - maximum) for the 8 keys in column j of the fragments.
template <int m, int n, int pack_gqa>
__device__ __forceinline__ void exponentiate(float (&S)[m][n][4], int j,
                                             const Rows<m * step, pack_gqa>& rows,
                                             float (&sum)[m][2]) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      S[i][j][e] = exp2f(S[i][j][e] * rows.scale2 - rows.maximum[i][e / 2]);
      sum[i][e / 2] += S[i][j][e];
    }
  }
}

// The same for all keys of the tile. A tile is summed up by itself before it joins the sums: with
// millions of keys, less is rounded away.
template <int m, int n, int pack_gqa>
__device__ __forceinline__ void exponentiate(float (&S)[m][n][4], Rows<m * step, pack_gqa>& rows) {
  float sum[m][2] = {};
#pragma unroll
  for (int j = 0; j < n; ++j) exponentiate(S, j, rows, sum);
  rows.add(sum);
}

// One tile's step of the online softmax: S becomes P; O and the sums are rescaled.
template <bool masked, int m, int keys, int cols, int pack_gqa>
__device__ __forceinline__ void softmax(float (&S)[m][keys][4], float (&O)[m][cols][4],
                                        Rows<m * step, pack_gqa>& rows, int first_key, int lane) {
  rescale<masked>(S, O, rows, first_key, lane);
  exponentiate(S, rows);
}

// The bits of a value if it is wanted, else 0; the caller takes several together by |. Compilers
// turn a choice between array elements into one between addresses, and put the array into memory.
__device__ __forceinline__ unsigned bits_if(bool wanted, float value) {
  return wanted ? __float_as_uint(value) : 0;
}

// O / sum, and lse: each of a row's four lanes computes that of another row.
template <int m, int n, int pack_gqa>
__device__ __forceinline__ void finish_rows(float (&O)[m][n][4],
                                            const Rows<m * step, pack_gqa>& rows, Tensor<real> lse,
                                            int batch, int head, int lane) {
#pragma unroll
  for (int first = 0; first < 2 * m; first += 4) {
    unsigned own_sum = 0, own_maximum = 0;
#pragma unroll
    for (int i = first; i < min(first + 4, 2 * m); ++i) {
      float sum = rows.sum[i / 2][i % 2];
      sum += __shfl_xor_sync(full_warp, sum, 1);
      sum += __shfl_xor_sync(full_warp, sum, 2);
      own_sum |= bits_if(lane % 4 == i - first, sum);
      own_maximum |= bits_if(lane % 4 == i - first, rows.maximum[i / 2][i % 2]);
      const float inverse = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
      for (int j = 0; j < n; ++j) {
        O[i / 2][j][i % 2 * 2] *= inverse;
        O[i / 2][j][i % 2 * 2 + 1] *= inverse;
      }
    }
    const int own = first + lane % 4, row = rows.row(0, 0) + own * 8;
    if (own < 2 * m && row < rows.extent.M * pack_gqa)
      *lse.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa) =
          __uint_as_float(own_maximum) / log2e + log(__uint_as_float(own_sum));
  }
}

// Each lane writes its elements of the `cols` columns of O.
template <int cols, int m, int n, int pack_gqa>
__device__ __forceinline__ void store_rows(const float (&O)[m][n][4],
                                           const Rows<m * step, pack_gqa>& rows, Tensor<scalar> out,
                                           int batch, int head, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = rows.row(i / 2, i % 2);
    if (row >= rows.extent.M * pack_gqa) continue;
    scalar* to = out.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa);
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
      if (col < cols) to[col] = scalar(O[i / 2][j / 2][i % 2 * 2 + j % 2]);
    }
  }
}
