#pragma once
// wgmma products of split float32 operands (split_pair.cuh). The two products with one low part
// have separate accumulators, scaled by 2^11.

#include <forward/parts/split_f32/split_pair.cuh>
#include <ptx/wgmma.cuh>
#include <tile/pipeline.cuh>
#include <tile/warpgroup.cuh>

// A TMA tile of split operands: each box holds the high parts of all rows, then the low parts.
template <int rows, int columns>
using SplitTile = TmaTile<operand, 2 * rows, columns>;
// High or low parts of P in registers, as operands.
template <int rows>
using SplitOperands = unsigned[rows / step][4];

// The tensor maps of the high and low parts of an array.
struct SplitMaps {
  const TensorMap &high, &low;
};

// Starts copying box i of a tile of split operands, without telling the barrier its size.
template <int all_rows, int columns>
__device__ __forceinline__ void load_split_box(TmaTile<operand, all_rows, columns>& tile, int i,
                                               const SplitMaps& maps, Barrier& barrier, int row,
                                               int head, int batch) {
  tma_load(tile.box[i], maps.high, barrier, i * tile.in_row, row, head, batch);
  tma_load(tile.box[i][all_rows / 2], maps.low, barrier, i * tile.in_row, row, head, batch);
}

// S = A B^T for 64 rows of A and n of B. If `joined`, one product multiplies A's high parts with
// both parts of B and reads them once; otherwise accumulators take a third fewer registers.
template <int n, bool joined = true>
struct SplitScores {
  float high[joined ? n : n / 2];  // A high * B high | A high * B low
  float low[n / 2];                // A low * B high

  // Begins the products; calls ready(i) before those of box i.
  template <int A_rows, int B_rows, int columns, class Ready>
  __device__ __forceinline__ void begin(const TmaTile<operand, A_rows, columns>& A,
                                        const TmaTile<operand, B_rows, columns>& B, Ready ready) {
    static_assert(A_rows == 2 * warpgroup_rows && B_rows == 2 * n, "tiles hold high and low parts");
#pragma unroll
    for (int k = 0; k < cdiv(columns, step); ++k) {
      if (k % 4 == 0) ready(k / 4);
      if (k == 0 || (k % 4 == 0 && !__is_empty(Ready))) wgmma_fence();  // again after waiting
      const int col = k % 4 * wgmma_bytes;
      const Matrix a = by_rows(A.box[k / 4]) + col, b = by_rows(B.box[k / 4]) + col;
      if constexpr (!joined) multiply<operand>(low, a, by_rows(B.box[k / 4][n]) + col, k > 0);
      multiply<operand>(high, a, b, k > 0);
      multiply<operand>(low, by_rows(A.box[k / 4][warpgroup_rows]) + col, b, !joined || k > 0);
    }
    wgmma_commit_group();
  }
  // Waits until at most `pending` later product groups are in flight, then adds up the parts of S.
  template <int pending = 0>
  __device__ __forceinline__ void wait(float (&S)[1][n / 8][4]) {
    wgmma_wait_group<pending>(high);
    read_after_here(low);
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float small = joined ? high[n / 2 + i] + low[i] : low[i];
      flat(S)[i] = fmaf(small, low_unit, high[i]);
    }
  }
};

// Splits P into operands of P V.
template <int n>
__device__ __forceinline__ void split_operands(float (&weights)[1][n][4],
                                               unsigned (&high)[n / 2][4],
                                               unsigned (&low)[n / 2][4]) {
#pragma unroll
  for (int i = 0; i < 2 * n; ++i)
    split_pair<operand>(flat(weights)[2 * i], flat(weights)[2 * i + 1], high[i / 4][i % 4],
                        low[i / 4][i % 4]);
}

// O += weight * P V, with P in registers, in parts of 64 columns that are accumulated from zero.
// Calls begun(part, is_last) once a part's products are issued, and read(part, is_last) once they
// have read their box of V.
template <int part = 0, int all_rows, int columns, int n, class Begun, class Read>
__device__ __forceinline__ void add_split_products(const TmaTile<operand, all_rows, columns>& V,
                                                   const unsigned (&P_high)[all_rows / 32][4],
                                                   const unsigned (&P_low)[all_rows / 32][4],
                                                   const float (&weight)[1][2], float (&O)[1][n][4],
                                                   Begun begun, Read read) {
  constexpr int left = 8 * n - part * box_columns, width = left < box_columns ? left : box_columns;
  constexpr bool is_last = width == left;
  float high[width / 2], low[width / 2];
  const auto& box = V.box[part];
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < all_rows / 32; ++k) {
    const Matrix V_high = by_columns(box[k * step], all_rows),
                 V_low = by_columns(box[all_rows / 2 + k * step], all_rows);
    multiply<operand>(low, P_high[k], V_low, k > 0);
    multiply<operand>(low, P_low[k], V_high, true);
    multiply<operand>(high, P_high[k], V_high, k > 0);
  }
  wgmma_commit_group();
  begun(part, is_last);
  wgmma_wait_group<0>(high);
  read_after_here(low);
  read(part, is_last);
#pragma unroll
  for (int i = 0; i < width / 2; ++i) {
    float& x = flat(O)[part * box_columns / 2 + i];
    x = fmaf(fmaf(low[i], low_unit, high[i]), weight[0][i % 4 / 2], x);
  }
  if constexpr (!is_last) add_split_products<part + 1>(V, P_high, P_low, weight, O, begun, read);
}
