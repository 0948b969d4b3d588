#pragma once
// lse * log2(e) and D = rowsum(dO * O) of the rows of a tile.

#include <backward/parts/row_product.cuh>
#include <backward/parts/row_sums.cuh>
#include <tile/tensor.cuh>

constexpr int lanes = 8;  // for each row
static_assert(threads % warp_size == 0 && Br % (threads / lanes) == 0, "rows in whole turns");

__device__ __forceinline__ void sum_tile(Tensor<const scalar> O, Tensor<const scalar> dO,
                                         Tensor<const real> lse, RowSums& sums, int tile, int head,
                                         int batch, int M) {
#pragma unroll
  for (int i = 0; i < Br; i += threads / lanes) {
    const int own = i + threadIdx.x / lanes, row = tile * Br + own;
    const float sum = row_product<lanes>(O, dO, batch, head, row, row < M);
    if (threadIdx.x % lanes == 0) {
      const float own_lse = row < M ? *lse.row(batch, head, row) : -infinity;
      const bool counts = own_lse != -infinity;
      sums.lse2[own] = counts ? own_lse * log2e : infinity;
      sums.delta[own] = counts ? sum : 0.0f;
    }
  }
}
