#pragma once
// Copies float64 tiles into shared memory, for products on tensor cores.

#include <attention/score_context.cuh>
#include <ptx/pack.cuh>
#include <tile/async_copy.cuh>
#include <tile/warp.cuh>

// Loads Q in operand order: of each 16 columns, lane c = 0 … 3 of a row gets columns 2c, 2c + 1,
// 2c + 8 and 2c + 9. Each pair holds rows r and r + 8 of a column.
template <int threads, int pack_gqa, int cols, int groups, int steps>
__device__ __forceinline__ void load_queries(double2 (&Q)[groups][steps][4][warp_size],
                                             const Head& queries, int first_row) {
  constexpr int depth = steps * step;
#pragma unroll 4
  for (int i = threadIdx.x; i < groups * step * depth; i += threads) {
    const int row = i / depth, col = i % depth, lane = row % 8 * 4 + col % 8 / 2;
    double2& pair = Q[row / step][col / step][col % step / 8 * 2 + col % 2][lane];
    const bool inside = first_row + row < queries.rows && col < cols;
    (row % step < 8 ? pair.x : pair.y) = inside ? queries.row<pack_gqa>(first_row + row)[col] : 0.0;
  }
}
