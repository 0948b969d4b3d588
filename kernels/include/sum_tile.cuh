#pragma once
// lse * log2(e) and D = rowsum(dO * O) of the rows of a tile. Eight lanes sum a row, and read whole
// cache lines of it.

#include <row_sums.cuh>
#include <tensor.cuh>
#include <warp.cuh>

constexpr int lanes = 8;  // for each row
static_assert(threads % warp_size == 0 && Br % (threads / lanes) == 0, "rows in whole turns");

// The sum of products of eight elements.
__device__ __forceinline__ float dot(const uint4& x, const uint4& y) {
  const scalar* a = reinterpret_cast<const scalar*>(&x);
  const scalar* b = reinterpret_cast<const scalar*>(&y);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += float(a[i]) * float(b[i]);
  return sum;
}

__device__ __forceinline__ void sum_tile(Tensor<const scalar> O, Tensor<const scalar> dO,
                                         Tensor<const real> lse, RowSums& sums, int tile, int head,
                                         int batch, int M) {
  const int lane = threadIdx.x % lanes;
  const bool aligned = dv % 8 == 0 && is_aligned(O) && is_aligned(dO);
#pragma unroll
  for (int i = 0; i < Br; i += threads / lanes) {
    const int own = i + threadIdx.x / lanes, row = tile * Br + own;
    float sum = 0;
    if (row < M) {
      const scalar* output = O.row(batch, head, row);
      const scalar* gradient = dO.row(batch, head, row);
      if (aligned) {
#pragma unroll
        for (int j = 0; j < cdiv(dv, 8 * lanes); ++j) {
          const int piece = j * lanes + lane;
          if (piece < dv / 8)
            sum += dot(reinterpret_cast<const uint4*>(output)[piece],
                       reinterpret_cast<const uint4*>(gradient)[piece]);
        }
      } else {
        for (int col = lane; col < dv; col += lanes)
          sum += float(output[col]) * float(gradient[col]);
      }
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(full_warp, sum, distance);
    if (lane == 0) {
      const float own_lse = row < M ? *lse.row(batch, head, row) : -infinity;
      const bool counts = own_lse != -infinity;
      sums.lse2[own] = counts ? own_lse * log2e : infinity;
      sums.delta[own] = counts ? sum : 0.0f;
    }
  }
}
