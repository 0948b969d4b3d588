#pragma once
// dQ of the query heads that share a key head, from the sums that its blocks have added up, by the
// last of these blocks: sums are still in L2 then, and the products of other heads go on meanwhile.
//
// The sums lie as registers of products do. A warp reads them so, and its lanes trade what they
// have of a row until each writes 16 bytes of it.

#include <own_keys.cuh>

// Whether a thread is the last of so many that come here. It then sees what they did before.
__device__ __forceinline__ bool is_last(int& count, int all) {
  __threadfence();
  const bool last = atomicAdd(&count, 1) == all - 1;
  __threadfence();
  return last;
}

// What all blocks of a key head are given, and leave.
struct Queries {
  Tensor<const scalar> Q, K, V, dO;
  Tensor<scalar> dQ;
  const RowSums* row_sums;
  const Part* dQ_sum;
  int N, heads, diagonal, lower;
  float scale;
};

// 16 rows of a part of a tile.
struct Piece {
  static constexpr int in_part = warpgroup_rows / step;

  int head, tile, part, first_row;
  float sums[part_width / 2];

  // Of all pieces of a group's heads, one by its number; there may be fewer.
  __device__ __forceinline__ Piece(int number, const Work& work, const Queries& in) {
    const int tiles = cdiv(work.M, Br), rest = number / in_part;
    const int own = number % in_part * step;
    part = rest % parts;
    tile = rest / parts % tiles;
    head = work.kv_head * work.group + rest / parts / tiles;
    first_row = tile * Br + own + (by_rows_of_dQ ? part * warpgroup_rows : 0);
    if (!exists(work)) return;
    const long long place = tile_of(work.batch, head, in.heads, tile * Br, work.M) * parts + part;
    const int thread = own / step * warp_size + threadIdx.x % warp_size;
#pragma unroll
    for (int i = 0; i < part_width / 8; ++i) {
      const float4 four = __ldcg(&in.dQ_sum[place].sums[i][thread]);
      sums[4 * i] = four.x, sums[4 * i + 1] = four.y;
      sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
    }
  }

  __device__ __forceinline__ bool exists(const Work& work) const {
    return head < (work.kv_head + 1) * work.group && first_row < work.M;
  }

  __device__ __forceinline__ void finish(const Work& work, const Queries& in) const {
    if (!exists(work)) return;
    const int first_col = by_columns_of_dQ ? part * part_width : 0;
    if (is_strange(sums)) {
      recompute_rows<part_width>(in.Q, in.K, in.V, in.dO, in.dQ, in.row_sums, first_row, head,
                                 in.heads, work.kv_head, work.batch, work.M, in.N, in.diagonal,
                                 in.lower, in.scale, first_col);
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
      store_row<d>(in.dQ.row(work.batch, head, row), pairs, first_col, aligned, row < work.M, lane);
    }
  }
};

// What the block's consumers do, warp by warp, with the loads of two pieces under way together.
__device__ __forceinline__ void finish_dQ(const Work& work, const Queries& in) {
  constexpr int warps = consuming_threads / warp_size;
  const int warp = threadIdx.x / warp_size % warps;
  const int pieces = work.group * cdiv(work.M, Br) * parts * Piece::in_part;
#pragma unroll 1
  for (int i = warp; i < pieces; i += 2 * warps) {
    const Piece one(i, work, in), other(i + warps, work, in);
    one.finish(work, in);
    other.finish(work, in);
  }
}
