#pragma once
// Products and stores of warpgroups that own 64 rows or keys of a gradient, with TMA tiles.

#include <tile/pipeline.cuh>
#include <tile/store.cuh>
#include <backward/parts/row_sums.cuh>
#include <tile/tensor.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/wgmma.cuh>

template <int columns>
using Sums = float[columns / 2];  // of a product of 64 rows
template <int columns>
using Operands = unsigned[columns / step][4];  // the same in 16 bits, as operands of products

constexpr int consuming_threads = consumers * warpgroup_size;

// The consumers have all registers but a few.
__device__ __forceinline__ void give_to_consumers() {
  decrease_registers<24>();
}
__device__ __forceinline__ void take_from_producer() {
  increase_registers<240>();
}

// Begins S = A B^T for the warpgroup's rows of A, of `columns` columns, and all rows of B.
template <int columns, int count, class Own, class Others>
__device__ __forceinline__ void begin_scores(float (&S)[count], const Own& A, const Others& B,
                                             int warpgroup) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < columns / step; ++k) {
    const Matrix own = by_rows(A.box[k / 4][warpgroup * warpgroup_rows]);
    multiply<scalar>(S, own + k % 4 * 32, by_rows(B.box[k / 4]) + k % 4 * 32, k > 0);
  }
  wgmma_commit_group();
}

// Begins to add the products of A, in registers, with the rows of a tile.
template <int count, int steps, class Others>
__device__ __forceinline__ void begin_sums(float (&sums)[count], const unsigned (&A)[steps][4],
                                           const Others& B) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < steps; ++k)
    multiply<scalar>(sums, A[k], by_columns(B.box, steps * step) + k * 2048, true);
  wgmma_commit_group();
}

template <int count, int steps>
__device__ __forceinline__ void pack_operands(const float (&sums)[count],
                                              unsigned (&operands)[steps][4]) {
  static_assert(count == steps * 8, "all of them");
#pragma unroll
  for (int i = 0; i < count / 2; ++i)
    operands[i / 4][i % 4] = pack<scalar>(sums[2 * i], sums[2 * i + 1]);
}

// Writes the warp's 16 rows of a gradient, times a factor, 16 bytes at a time where rows lie so.
template <int columns, int count>
__device__ __forceinline__ void store_gradient(const float (&sums)[count], float factor, int first,
                                               Tensor<scalar> gradient, int batch, int head,
                                               int end, int lane) {
  const bool aligned = is_aligned(gradient);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned pairs[count / 4];
#pragma unroll
    for (int n = 0; n < count / 4; ++n)
      pairs[n] = pack<scalar>(sums[4 * n + 2 * half] * factor, sums[4 * n + 2 * half + 1] * factor);
    const int row = first + lane / 4 + half * 8;
    store_row<columns>(gradient.row(batch, head, row), pairs, 0, aligned, row < end, lane);
  }
}
