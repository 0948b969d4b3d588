#pragma once
// Products of warpgroups. Each function commits a group, for which callers wait (ptx/wgmma.cuh).

#include <ptx/wgmma.cuh>
#include <tile/pipeline.cuh>
#include <tile/warpgroup.cuh>

// Starts S = A B^T, or S += A B^T if `added`, for 64 rows of A from a row and B from `first` on.
template <class T, int A_rows, int B_rows, int columns, int count>
__device__ __forceinline__ void begin_scores(const TmaTile<T, A_rows, columns>& A,
                                             const TmaTile<T, B_rows, columns>& B,
                                             float (&S)[count], int row = 0, int first = 0,
                                             bool added = false) {
  const Matrix a = by_rows(A.box[0][row]), b = by_rows(B.box[0][first]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < cdiv(columns * int(sizeof(T)), wgmma_bytes); ++k) {
    const int box = k / 4, col = k % 4 * wgmma_bytes;
    multiply<T>(S, a + (box * int(sizeof A.box[0]) + col), b + (box * int(sizeof B.box[0]) + col),
                added || k > 0);
  }
  wgmma_commit_group();
}

// Starts O += P V, or O = P V unless `added`. P is in registers; V starts at `row`.
template <class T, int rows, int columns, int steps, int count>
__device__ __forceinline__ void begin_output(const TmaTile<T, rows, columns>& V,
                                             const unsigned (&P)[steps][4], float (&O)[count],
                                             bool added = true, int row = 0) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < steps; ++k)
    multiply<T>(O, P[k], by_columns(V.box[0][row], rows) + k * 16 * box_row_bytes, added || k > 0);
  wgmma_commit_group();
}

// Packs S, rounded to T, into A operands of the next product.
template <class T, int steps, int count>
__device__ __forceinline__ void pack_operands(const float (&S)[count], unsigned (&P)[steps][4]) {
  static_assert(count == 8 * steps, "all of S");
#pragma unroll
  for (int i = 0; i < count / 2; ++i) P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
}
