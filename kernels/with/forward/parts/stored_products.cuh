#pragma once
// The products of mma_products.cuh for keys and values in e4m3, which are unpacked to operands in
// registers. A tile holds two e4m3 numbers in place of an operand; rows are padded to 32 bytes.
//
// ldmatrix gives a lane four bytes in place of two operands. For keys these are columns 4 c … 4 c +
// 3, c = l % 4. Products sum columns in any order, so Q is read in the same order. For values the
// bytes of a column pair belong to two keys; of every 16 columns, O has the even ones in one
// fragment and the odd ones in the next.

#include <attention/kv_dtype.cuh>
#include <attention/key_head.cuh>
#include <forward/parts/mma_products.cuh>
#include <ptx/unpack_e4m3.cuh>
#include <timeline.cuh>

// Computes S = Q K^T for the warp's rows and the tile's keys, times factor(key) per 16 keys.
template <int Br, int columns, int Bc, int pairs, int m, int n, class Factor>
__device__ __forceinline__ void multiply_scores_e4m3(operand (&Q)[Br][columns],
                                                     operand (&K)[Bc][pairs], float (&S)[m][n][4],
                                                     int first_row, int lane, Factor factor) {
  const timeline::Phase phase(timeline::products);
  const auto queries = [&](int row, int k) {
    const operand* chunk = at(Q, first_row + row + lane / 4, 2 * k + lane % 4 / 2);
    return *reinterpret_cast<const uint2*>(chunk + lane % 2 * 4);
  };
#pragma unroll
  for (int k = 0; k < pairs / in_chunk; k += 2) {  // 16 columns of K per chunk
    unsigned a[2][m][4];
#pragma unroll
    for (int i = 0; i < 2 * m; ++i) {
      const uint2 upper = queries(i / 2 * step, k + i % 2),
                  lower = queries(i / 2 * step + 8, k + i % 2);
      unsigned (&to)[4] = a[i % 2][i / 2];
      to[0] = upper.x, to[1] = lower.x, to[2] = upper.y, to[3] = lower.y;
    }
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      unsigned four[4], b[2];  // two of 16 columns for 8 keys, then for the next 8
      ldmatrix(four, at(K, j * 8 + lane / 16 * 8 + lane % 8, k + lane / 8 % 2));
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        unpack_e4m3<operand>(four[x], b[0], b[1]);
#pragma unroll
        for (int i = 0; i < m; ++i) multiply_add<operand>(S[i][j + x / 2], a[x % 2][i], b[0], b[1]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float scale = factor(j / 2 * 16);
#pragma unroll
    for (int i = 0; i < 4 * m; ++i) S[i / 4][j][i % 4] *= scale;
  }
}

// Computes P = exp(S - maximum) and O += P V. If values have `factors`, each sum over 16 keys is
// multiplied by factor(key) before it is added to O.
template <bool factors, int Bc, int pairs, int m, int keys, int cols, int pack_gqa, class Factor>
__device__ __forceinline__ void multiply_output_e4m3(operand (&V)[Bc][pairs],
                                                     float (&S)[m][keys][4], float (&O)[m][cols][4],
                                                     Rows<m * step, pack_gqa>& rows, int lane,
                                                     Factor factor) {
  const timeline::Phase phase(timeline::products);
  float sum[m][2] = {};
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    exponentiate(S, 2 * k, rows, sum);
    exponentiate(S, 2 * k + 1, rows, sum);
    const float scale = factors ? factor(k * step) : 1.0f;
    unsigned a[m][4];
#pragma unroll
    for (int i = 0; i < m * 4; ++i) {
      const float (&p)[4] = S[i / 4][2 * k + i % 4 / 2];
      a[i / 4][i % 4] = pack<operand>(p[i % 2 * 2], p[i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < cols; n += 4) {
      unsigned four[4];  // 16 keys of 16 columns, then of the next 16
      ldmatrix_trans(four, at(V, k * step + lane % 16, n / 2 + lane / 16));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned even[2], odd[2];
#pragma unroll
        for (int x = 0; x < 2; ++x)
          unpack_e4m3<operand>(swap_middle(four[2 * half + x]), even[x], odd[x]);
#pragma unroll
        for (int i = 0; i < 2 * m; ++i) {
          const unsigned (&b)[2] = i % 2 == 0 ? even : odd;
          float (&to)[4] = O[i / 2][n + 2 * half + i % 2];
          if constexpr (factors) {
            float part[4] = {};
            multiply_add<operand>(part, a[i / 2], b[0], b[1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) to[e] += scale * part[e];
          } else {
            multiply_add<operand>(to, a[i / 2], b[0], b[1]);
          }
        }
      }
    }
  }
  rows.add(sum);
}

// Restores the column order of mma.cuh in O, and multiplies O by a factor.
template <int m, int n>
__device__ __forceinline__ void restore_columns(float (&O)[m][n][4], float factor, int lane) {
  const int from =
      lane / 4 * 4 + lane % 4 / 2;  // lane of the first two columns; the last two are 2 lanes on
#pragma unroll
  for (int i = 0; i < m * n / 2; ++i) {
    float (&even)[4] = O[i * 2 / n][i * 2 % n], (&odd)[4] = O[i * 2 / n][i * 2 % n + 1];
#pragma unroll
    for (int e = 0; e < 4; e += 2) {  // rows l / 4 and l / 4 + 8
      float found[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float (&of)[4] = x % 2 == 0 ? even : odd;
        const float lower = __shfl_sync(full_warp, of[e], from + x / 2 * 2),
                    upper = __shfl_sync(full_warp, of[e + 1], from + x / 2 * 2);
        found[x] = factor * (lane % 2 == 0 ? lower : upper);
      }
      even[e] = found[0], even[e + 1] = found[1], odd[e] = found[2], odd[e + 1] = found[3];
    }
  }
}

// Steps of mma_split_kv for keys and values in their stored dtype.
template <class Scales, int Br, int columns, int Bc, int stored, int m, int n>
__device__ __forceinline__ void multiply_stored_scores(operand (&Q)[Br][columns],
                                                       operand (&K)[Bc][stored],
                                                       float (&S)[m][n][4], int first_row, int lane,
                                                       [[maybe_unused]] const Scales& scales,
                                                       [[maybe_unused]] const KeyHead& keys,
                                                       [[maybe_unused]] int first_key) {
  if constexpr (Scales::used)
    multiply_scores_e4m3(Q, K, S, first_row, lane,
                         [&](int key) { return scales.keys.of_row(keys, first_key + key); });
  else
    multiply_scores(Q, K, S, first_row, lane);
}

template <class Scales, int Bc, int stored, int m, int n, int cols, int pack_gqa>
__device__ __forceinline__ void multiply_stored_output(operand (&V)[Bc][stored],
                                                       float (&S)[m][n][4], float (&O)[m][cols][4],
                                                       Rows<m * step, pack_gqa>& rows,
                                                       int first_key, int lane,
                                                       [[maybe_unused]] const Scales& scales,
                                                       [[maybe_unused]] const KeyHead& values) {
  if constexpr (Scales::used)
    multiply_output_e4m3<decltype(scales.values)::by_page>(V, S, O, rows, lane, [&](int key) {
      return scales.values.of_row(values, first_key + key);
    });
  else
    multiply_output(V, S, O, rows, first_key, lane);
}

template <class Scales, int m, int n>
__device__ __forceinline__ void finish_stored([[maybe_unused]] const Scales& scales,
                                              [[maybe_unused]] float (&O)[m][n][4],
                                              [[maybe_unused]] int lane) {
  if constexpr (Scales::used) {
    constexpr bool by_page = decltype(scales.values)::by_page;
    restore_columns(O, by_page ? 1.0f : scales.values.of_all(), lane);
  }
}
