#pragma once
// dQ from the sums of wgmma_columns.cu, by the last block of a key head or by a launch of its own.
//
// The sums lie as registers of products do. A warp reads them so, and its lanes trade what they
// have of a row until each writes 16 bytes of it.

#include <backward/parts/own_keys.cuh>

// What dQ is finished from, and computed once more from where there is anything strange in it.
struct Queries {
  Tensor<const scalar> Q, K, V, dO;
  Tensor<scalar> dQ;
  const RowSums* row_sums;
  const Part* dQ_sum;
  int M, N, heads, group, causal_offset, window_offset;
  float scale;
};

// 16 rows of a part of a tile, of which a warp has number `own`; there may be none of M.
struct Piece {
  static constexpr int in_part = warpgroup_rows / step;

  int batch, head, part, first_row;
  float sums[part_width / 2];

  __device__ __forceinline__ Piece(const Queries& in, int batch, int head, int tile, int part,
                                   int own)
      : batch(batch), head(head), part(part) {
    first_row = tile * Br + own * step + (by_rows_of_dQ ? part * warpgroup_rows : 0);
    if (head >= in.heads || first_row >= in.M) return;
    const long long place = tile_of(batch, head, in.heads, tile * Br, in.M) * parts + part;
    const int thread = own * warp_size + threadIdx.x % warp_size;
#pragma unroll
    for (int i = 0; i < part_width / 8; ++i) {
      const float4 four = __ldcg(&in.dQ_sum[place].sums[i][thread]);
      sums[4 * i] = four.x, sums[4 * i + 1] = four.y;
      sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void finish(const Queries& in) const {
    if (head >= in.heads || first_row >= in.M) return;
    const int first_col = by_columns_of_dQ ? part * part_width : 0;
    if (has_nonfinite(sums)) {
      recompute_rows<part_width>(in.Q, in.K, in.V, in.dO, in.dQ, in.row_sums, first_row, head,
                                 in.heads, head / in.group, batch, in.M, in.N, in.causal_offset,
                                 in.window_offset, in.scale, first_col);
      return;
    }
    const bool aligned = is_aligned(in.dQ);
    const int lane = threadIdx.x % warp_size;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned pairs[part_width / 8];
#pragma unroll
      for (int n = 0; n < part_width / 8; ++n)
        pairs[n] =
            pack<scalar>(sums[4 * n + 2 * half] * in.scale, sums[4 * n + 2 * half + 1] * in.scale);
      const int row = first_row + lane / 4 + half * 8;
      store_row<d>(in.dQ.row(batch, head, row), pairs, first_col, aligned, row < in.M, lane);
    }
  }
};
