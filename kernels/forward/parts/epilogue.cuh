#pragma once
// The epilogue of a tile of Q: each warp divides O by the row sums and stores O and lse.

#include <attention/finish_rows.cuh>
#include <attention/nonfinite.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <tile/store.cuh>
#include <timeline.cuh>

// Stores the warp's 16 rows of O, from column `first_col` on.
template <int dv, int blocks, int pack_gqa>
__device__ __forceinline__ void store_output(const float (&O)[1][blocks][4],
                                             const Rows<step, pack_gqa>& rows, Tensor<result> out,
                                             int batch, int head, int lane, int first_col = 0) {
  const bool aligned = is_aligned(out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    decltype(stored_pair<result>(0, 0)) pairs[blocks];
#pragma unroll
    for (int n = 0; n < blocks; ++n)
      pairs[n] = stored_pair<result>(O[0][n][half * 2], O[0][n][half * 2 + 1]);
    const int row = rows.row(0, half);
    result* to = out.row(batch, head * pack_gqa + row % pack_gqa, row / pack_gqa);
    store_row<dv>(to, pairs, first_col, aligned, row < rows.extent.M * pack_gqa, lane);
  }
}

// Finishes a warp's rows. If any is wrong (nonfinite.cuh), recomputes all rows from Q, K and V.
template <int d, int dv>
struct Epilogue {
  Tensor<const operand> Q, K, V;
  Tensor<result> O;
  Tensor<real> lse;
  int group;
  Scorer<real> scorer;

  template <int blocks>
  __device__ __forceinline__ void operator()(float (&sums)[1][blocks][4], const Rows<step>& rows,
                                             const RowTile& task) const {
    const timeline::Phase phase(timeline::epilogue);
    const int lane = threadIdx.x % warp_size;
    if (needs_repair(sums, rows)) {
      repair_rows<d, dv>(Q, K, V, O, lse, rows, task.batch, task.head, task.head / group, scorer);
      return;
    }
    finish_rows(sums, rows, lse, task.batch, task.head, lane);
    store_output<dv>(sums, rows, O, task.batch, task.head, lane);
  }
};
