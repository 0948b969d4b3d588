#pragma once
// dQ from the sums of wgmma_columns.cu, by the last block of a key head or by a launch of its own.
//
// The sums lie as registers of products do. A warp reads them so, and its lanes trade what they
// have of a row until each writes 16 bytes of it.

#include <backward/parts/own_keys.cuh>

// What dQ is finished from; where it is not finite, it is computed again from the inputs.
struct Queries {
  Tensor<const scalar> Q, K, V, dO;
  Tensor<scalar> dQ;
  const RowSums* row_sums;
  const Part* dQ_sum;
  Extent extent;
  int heads, group;
  Scorer<float> scorer;
};

// 16 rows of a part of a tile, number `own` of a warp; they may lie outside the array.
struct Piece {
  static constexpr int in_part = warpgroup_rows / step;

  int batch, head, part, first_row;
  float sums[part_width / 2];

  __device__ __forceinline__ Piece(const Queries& in, int batch, int head, int tile, int part,
                                   int own)
      : batch(batch), head(head), part(part) {
    first_row = tile * Br + own * step + (by_rows_of_dQ ? part * warpgroup_rows : 0);
    if (head >= in.heads || first_row >= in.extent.M) return;
    const long long place = tile_of(batch, head, in.heads, tile * Br, in.extent.M) * parts + part;
    const int thread = own * warp_size + threadIdx.x % warp_size;
#pragma unroll
    for (int i = 0; i < part_width / 8; ++i) {
      const float4 four = __ldcg(&in.dQ_sum[place].sums[i][thread]);
      sums[4 * i] = four.x, sums[4 * i + 1] = four.y;
      sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void finish(const Queries& in) const {
    if (head >= in.heads || first_row >= in.extent.M) return;
    const int first_col = by_columns_of_dQ ? part * part_width : 0;
    if (!all_finite(sums)) {
      const RepairKeys repair = {in.extent, in.Q,  in.K,
                                 in.V,      in.dO, {in.row_sums, batch, in.heads, in.extent.M},
                                 in.scorer, batch, head / in.group};
      repair.rows<part_width>(in.dQ, head, first_row, first_row + step, first_col);
      return;
    }
    const bool aligned = is_aligned(in.dQ);
    const int lane = threadIdx.x % warp_size;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned pairs[part_width / 8];
#pragma unroll
      for (int n = 0; n < part_width / 8; ++n)
        pairs[n] = pack<scalar>(sums[4 * n + 2 * half] * in.scorer.scale,
                                sums[4 * n + 2 * half + 1] * in.scorer.scale);
      const int row = first_row + lane / 4 + half * 8;
      store_row<d>(in.dQ.row(batch, head, row), pairs, first_col, aligned, row < in.extent.M, lane);
    }
  }
};
