#pragma once
// Splits the keys of a tile among warps that share rows, and adds their accumulators at the end.

#include <attention/row_state.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

// Returns `count` keys of a tile from `first` on, a multiple of 16, so that the swizzle matches.
template <int count, int height, int columns>
__device__ __forceinline__ operand (&keys_from(operand (&tile)[height][columns], int first))
    [count][columns] { return reinterpret_cast<operand(&)[count][columns]>(tile[first]); }

// A warp's accumulators (O and row sums) and row maxima: m fragments of 16 rows, n of 8 columns.
template <int m, int n>
struct WarpSums : RowMaxima<2 * m * warp_size> {
  float4 O[m * n][warp_size];
  float maximum[2 * m][warp_size], sum[2 * m][warp_size];
};

// Adds the accumulators of all warps that share rows, through shared memory (`all`). Each warp adds
// its share of the fragments; the first one gets the result. All threads of the block call this.
template <int warps, int m, int n, int pack_gqa>
__device__ __forceinline__ void add_up(WarpSums<m, n>* all, int warp, float (&O)[m][n][4],
                                       Rows<m * step, pack_gqa>& rows, int lane) {
  const timeline::Phase phase(timeline::epilogue);
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    all[warp].maximum[i][lane] = rows.maximum[i / 2][i % 2];
    all[warp].sum[i][lane] = rows.sum[i / 2][i % 2];
    all[warp].set_row_max(i * warp_size + lane, rows.row_max(i));
  }
#pragma unroll
  for (int i = 0; i < m * n; ++i) {
    const float (&o)[4] = O[i / n][i % n];
    all[warp].O[i][lane] = {o[0], o[1], o[2], o[3]};
  }
  __syncthreads();  // wait until all warps have written their sums

  float factor[warps][2 * m];
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    float &maximum = rows.maximum[i / 2][i % 2], &sum = rows.sum[i / 2][i % 2];
#pragma unroll
    for (int w = 0; w < warps; ++w) {
      maximum = fmax(maximum, all[w].maximum[i][lane]);
      rows.raise_row_max(i, all[w].row_max(i * warp_size + lane));
    }
    sum = 0;
#pragma unroll
    for (int w = 0; w < warps; ++w) {
      factor[w][i] = exp2f(all[w].maximum[i][lane] - maximum);
      sum += factor[w][i] * all[w].sum[i][lane];
    }
  }
#pragma unroll
  for (int first = 0; first < m * n; first += warps) {
    const int i = first + warp;
    if (m * n % warps != 0 && i >= m * n) continue;
    const int row = n % warps == 0 || m == 1 ? first / n : i / n;  // usually known at compile time
    float4 total = {};
#pragma unroll
    for (int w = 0; w < warps; ++w) {
      const float4 o = all[w].O[i][lane];
      const float upper = factor[w][2 * row], lower = factor[w][2 * row + 1];
      total.x += upper * o.x, total.y += upper * o.y;
      total.z += lower * o.z, total.w += lower * o.w;
    }
    all[0].O[i][lane] = total;
  }
  __syncthreads();  // wait until all shares are complete
  if (warp > 0) return;
#pragma unroll
  for (int i = 0; i < m * n; ++i) {
    const float4 o = all[0].O[i][lane];
    float (&to)[4] = O[i / n][i % n];
    to[0] = o.x, to[1] = o.y, to[2] = o.z, to[3] = o.w;
  }
}
