#pragma once
// Keeps tile rows in registers as operand A of S = A B^T.

#include <ptx/wgmma_rows.cuh>
#include <tile/warpgroup_products.cuh>

// Pointers into a tile's row statistics, at the first row that is processed.
struct SumsOfRows {
  const float *lse2, *delta;
};

// Loads the warp's 16 rows of a tile, starting at first_row.
template <class T, int rows, int columns, int steps>
__device__ __forceinline__ void load_operands(TmaTile<T, rows, columns>& tile,
                                              unsigned (&A)[steps][4], int first_row) {
  const int lane = threadIdx.x % warp_size, row = first_row + lane / 4;
#pragma unroll
  for (int i = 0; i < 4 * steps; ++i) {
    T* const chunk = tile.at(row + i % 2 * 8, i / 2);
    A[i / 4][i % 4] = *reinterpret_cast<const unsigned*>(chunk + 2 * (lane % 4));
  }
}

// Starts S = A B^T with A in registers, for the rows of B from `first` on.
template <class T, int rows, int columns, int steps, int count>
__device__ __forceinline__ void begin_scores(const unsigned (&A)[steps][4],
                                             const TmaTile<T, rows, columns>& B, float (&S)[count],
                                             int first = 0) {
  static_assert(TmaTile<T, rows, columns>::count == 1, "B has one box");
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < steps; ++k)
    multiply_rows<T>(S, A[k], by_rows(B.box[0][first]) + k * wgmma_bytes, k > 0);
  wgmma_commit_group();
}
