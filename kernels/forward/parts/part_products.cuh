#pragma once
// Products of floats as parts in float16 (half_parts.cuh), and the softmax between the two of them.
//
// x y = (xh + xl / 2^11) (yh + yl / 2^11), without xl yl, which is below what a float keeps. The
// two products with a low part have sums of their own: they are 2^11 times larger than they count.

#include <attention/row_softmax.cuh>
#include <forward/parts/half_parts.cuh>
#include <ptx/mma.cuh>
#include <tile/chunk_addresses.cuh>

static_assert(sizeof(operand) == 2, "these tensor-core products take 16-bit numbers");

constexpr int weight_exponent = 15;  // of the largest weight of a row in each tile

// The rows of a warp. `units` turn the products of a row into scores, as exponents of two. Maxima
// are those of scores less 15.
template <int Wr, int pack_gqa>
struct PartRows : Rows<Wr, pack_gqa> {
  real units[Wr / step][2];

  __device__ __forceinline__ PartRows(int first, const Extent& extent, real scale2,
                                      bool takes_sink = true)
      : Rows<Wr, pack_gqa>(first, extent, scale2, takes_sink) {
    raise_maxima(-weight_exponent);
  }
  __device__ __forceinline__ void raise_maxima(real by) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) this->maximum[i / 2][i % 2] += by;
  }
  // Reads the units. A row past the end has that of the last one.
  __device__ __forceinline__ void read_units(Tensor<const real> from, int batch, int head) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) {
      const int row = this->existing(i / 2, i % 2);
      units[i / 2][i % 2] = *from.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa);
    }
  }
};

// D += A B and C += what low parts add, for 16 columns of A and 16 of B: D's fragments 2 j, 2 j
// + 1.
template <int m, int n>
__device__ __forceinline__ void multiply_parts(float (&D)[m][n][4], float (&C)[m][n][4], int j,
                                               const unsigned (&high)[m][4],
                                               const unsigned (&low)[m][4],
                                               const unsigned (&B_high)[4],
                                               const unsigned (&B_low)[4]) {
  const auto multiply = [&](float (&sums)[m][n][4], const unsigned (&a)[m][4],
                            const unsigned (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 2 * m; ++i)
      multiply_add<operand>(sums[i / 2][2 * j + i % 2], a[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
  };
  multiply(C, high, B_low);
  multiply(D, high, B_high);
  multiply(C, low, B_high);
}

// S = Q K^T for the warp's rows and the tile's keys, both as parts.
template <int Br, int Bc, int depth, int m, int n>
__device__ __forceinline__ void multiply_scores(operand (&Q)[2][Br][depth],
                                                operand (&K)[2][Bc][depth], float (&S)[m][n][4],
                                                int first_row, int lane) {
  const int own_row = first_row + lane % 16, own_key = lane / 16 * 8 + lane % 8;
  const ChunkAddresses queries(Q[0], own_row, lane / 16), keys(K[0], own_key, lane / 8 % 2);
  float C[m][n][4] = {};
#pragma unroll 1
  for (int k = 0; k < depth / step; ++k) {
    unsigned high[m][4], low[m][4];
#pragma unroll
    for (int i = 0; i < m; ++i) {
      ldmatrix(high[i], queries(i * step, 2 * k));
      ldmatrix(low[i], queries(Br + i * step, 2 * k));
    }
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      unsigned b_high[4], b_low[4];
      ldmatrix(b_high, keys(j * step, 2 * k));
      ldmatrix(b_low, keys(Bc + j * step, 2 * k));
      multiply_parts(S, C, j, high, low, b_high, b_low);
    }
  }
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) {
    float& x = S[i / (4 * n)][i / 4 % n][i % 4];
    x = fmaf(C[i / (4 * n)][i / 4 % n][i % 4], low_unit, x);
  }
}

// Products become what the softmax takes: scores where a text changes them, else products.
template <class T, int m, int n, int pack_gqa, class Pairs = NoPairs>
__device__ __forceinline__ void apply_scorer(const Scorer<T>& scorer, float (&S)[m][n][4],
                                             const PartRows<m * step, pack_gqa>& rows,
                                             int first_key, bool is_full, const Pairs& pairs = {}) {
  if constexpr (has_score_text) {
#pragma unroll
    for (int i = 0; i < m * n * 4; ++i)
      S[i / (4 * n)][i / 4 % n][i % 4] *= rows.units[i / (4 * n)][i % 4 / 2];
  }
  scorer.apply(S, rows, first_key, is_full, pairs);
}

// S becomes P = 2^(S * unit - origin), 2^15 in the largest place of each row: relative to the
// maximum of the tile, not of all tiles, so that parts hold the weights of tiles far below that.
// Rescales O and the sums; `weight` is what the tile's product with V is multiplied by.
template <bool masked, int m, int n, int cols, int pack_gqa>
__device__ __forceinline__ void weigh(float (&S)[m][n][4], float (&O)[m][cols][4],
                                      PartRows<m * step, pack_gqa>& rows, int first_key, int lane,
                                      float (&weight)[m][2]) {
  float maximum[m][2], factor[m][2], unit[m][2], sum[m][2] = {};
  find_maxima<masked>(S, rows, first_key, lane, maximum);
  bool risen = false;
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    float& origin = maximum[i / 2][i % 2];
    unit[i / 2][i % 2] = has_score_text ? rows.scale2 : rows.units[i / 2][i % 2];
    origin = fmax(fmaf(origin, unit[i / 2][i % 2], -float(weight_exponent)), -largest);
    const float before = rows.maximum[i / 2][i % 2], now = fmax(before, origin);
    factor[i / 2][i % 2] = exp2f(before - now);
    weight[i / 2][i % 2] = exp2f(origin - now) * (1.0f / (1 << weight_exponent));
    risen |= now != before;
    rows.maximum[i / 2][i % 2] = now;
  }
  if (__any_sync(full_warp, risen)) {
    rows.scale(factor);
    scale_rows(O, factor);
  }
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) {
    const int row = i / (4 * n), half = i % 4 / 2;
    float& x = S[row][i / 4 % n][i % 4];
    x = exp2f(fmaf(x, unit[row][half], -maximum[row][half]));
    sum[row][half] += x;
  }
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) sum[i / 2][i % 2] *= weight[i / 2][i % 2];
  rows.add(sum);
  for_dropped(S, 0, n / 2, rows, first_key, [&](int i, int j, int e) { S[i][j][e] = 0; });
}

// O += weight * P V, 16 columns at a time. Their sums begin at zero: tensor cores cut off what does
// not fit next to the sum so far, registers round.
template <int Bc, int width, int m, int n>
__device__ __forceinline__ void multiply_output(operand (&V)[2][Bc][width],
                                                const float (&P)[m][n][4],
                                                float (&O)[m][width / 8][4],
                                                const float (&weight)[m][2], int lane) {
  unsigned high[n / 2][m][4], low[n / 2][m][4];
#pragma unroll
  for (int i = 0; i < n / 2 * m * 4; ++i) {
    const int k = i / (4 * m), row = i / 4 % m;
    const float (&p)[4] = P[row][2 * k + i % 4 / 2];
    split_pair<operand>(p[i % 2 * 2], p[i % 2 * 2 + 1], high[k][row][i % 4], low[k][row][i % 4]);
  }
  const ChunkAddresses values(V[0], lane % 16, lane / 16);
#pragma unroll
  for (int j = 0; j < width / step; ++j) {
    float sums[m][2][4] = {}, C[m][2][4] = {};
#pragma unroll
    for (int k = 0; k < n / 2; ++k) {
      unsigned b_high[4], b_low[4];
      ldmatrix_trans(b_high, values(k * step, 2 * j));
      ldmatrix_trans(b_low, values(Bc + k * step, 2 * j));
      multiply_parts(sums, C, 0, high[k], low[k], b_high, b_low);
    }
#pragma unroll
    for (int i = 0; i < m * 8; ++i) {
      const int row = i / 8, half = i / 4 % 2, e = i % 4;
      float& o = O[row][2 * j + half][e];
      o = fmaf(fmaf(C[row][half][e], low_unit, sums[row][half][e]), weight[row][e / 2], o);
    }
  }
}
