#pragma once
// O of many keys: registers sum up those of a section of keys. What earlier sections gave waits in
// memory, in the places of O and, for maxima, of lse. A float that thousands of tiles are added to
// would lose more by rounding than products of parts do.

#include <attention/row_state.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr int section = 4096;  // keys

__device__ __forceinline__ bool are_of_one_section(int key, int other) {
  return key / section == other / section;
}

// Adds what earlier sections gave to a warp's rows of O, if there are any. If it `moves` them they
// wait in memory then, and O begins at zero.
template <bool moves, int cols, int m, int n, int pack_gqa>
__device__ __forceinline__ void add_earlier_keys(real (&O)[m][n][4],
                                                 const Rows<m * step, pack_gqa>& rows,
                                                 Tensor<result> out, Tensor<real> lse, int batch,
                                                 int head, int lane, bool has_earlier) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = rows.row(i / 2, i % 2), query = row / pack_gqa;
    const int own_head = head * pack_gqa + row % pack_gqa;
    const bool is_there = row < rows.extent.M * pack_gqa;
    const real now = rows.maximum[i / 2][i % 2];
    real factor = 0;
    if (is_there && has_earlier) factor = exp2f(*lse.row(batch, own_head, query) - now);
    __syncwarp();  // all lanes of the row have read its maximum
    if (!is_there) continue;
    result* place = out.row(batch, own_head, query);
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
      real& x = O[i / 2][j / 2][i % 2 * 2 + j % 2];
      if (has_earlier && col < cols) x = fmaf(place[col], factor, x);
      if (moves && col < cols) place[col] = x;
      if (moves) x = 0;
    }
    if (moves && lane % 4 == 0) *lse.row(batch, own_head, query) = now;
  }
}
