#pragma once
// Accumulates O in sections of many keys. Global memory holds the total of earlier sections: O in
// the output array, the row maxima in the array of lse. A single running sum of thousands of tiles
// would lose more to rounding than the split products do.

#include <attention/row_state.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr int section = 8192;  // keys per section

__device__ __forceinline__ int end_of_section(int key) {
  return (key / section + 1) * section;
}

// Row sums of earlier sections, for a warp's rows.
template <int m>
struct EarlierSums {
  real sum[m][2] = {};
  bool any = false;

  // Adds earlier sections to O and the row sums. If `moves`, stores the totals and zeroes both.
  template <bool moves, int cols, int n, int pack_gqa>
  __device__ __forceinline__ void add(real (&O)[m][n][4], Rows<m * step, pack_gqa>& rows,
                                      Tensor<result> out, Tensor<real> lse, int batch, int head,
                                      int lane) {
#pragma unroll
    for (int i = 0; i < 2 * m; ++i) {
      const int row = rows.row(i / 2, i % 2), query = row / pack_gqa;
      const int own_head = head * pack_gqa + row % pack_gqa;
      const bool exists = row < rows.extent.M * pack_gqa;
      const real now = rows.maximum[i / 2][i % 2];
      real factor = 0, &earlier = sum[i / 2][i % 2], &own = rows.sum[i / 2][i % 2];
      if (exists && any) factor = exp2f(*lse.row(batch, own_head, query) - now);
      __syncwarp();  // all lanes of the row have read its maximum
      earlier = fmaf(earlier, factor, own);
      own = moves ? 0 : earlier;
      if (!exists) continue;
      result* place = out.row(batch, own_head, query);
#pragma unroll
      for (int j = 0; j < 2 * n; ++j) {
        const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
        real& x = O[i / 2][j / 2][i % 2 * 2 + j % 2];
        if (col < cols) {
          if (any) x = fmaf(place[col], factor, x);
          if (moves) place[col] = x;
        }
        if (moves) x = 0;
      }
      if (moves && lane % 4 == 0) *lse.row(batch, own_head, query) = now;
    }
    any = moves;
  }
};
