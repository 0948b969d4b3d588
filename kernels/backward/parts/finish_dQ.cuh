#pragma once
// Scales and stores dQ of wgmma_columns.cu, in the last block of a key head or in another launch.
//
// The accumulators are stored in register order. A warp reads them in this order, and its lanes
// exchange elements of a row until each lane can write 16 contiguous bytes.

#include <backward/parts/gradient_warpgroups.cuh>
#include <backward/parts/query_layout.cuh>
#include <backward/parts/register_tile.cuh>
#include <backward/parts/repair_rows.cuh>
#include <backward/parts/row_sums.cuh>
#include <backward/parts/store_gradient.cuh>

// The dQ accumulators, and the inputs for recomputing rows that are not finite.
template <int Br, int d, int dv>
struct QuerySums {
  Repair<d, dv, scalar, StatsOfTiles<Br>> repair;
  const RegisterTile<QueryLayout<Br, d, dv>::width>* parts;
  Tensor<result> dQ;
};

// Slice `own` of a part of a dQ tile: 16 rows, which may lie outside the array.
template <int Br, int d, int dv>
struct Piece {
  using Layout = QueryLayout<Br, d, dv>;
  static constexpr int in_part = warpgroup_rows / step;

  int head, first_row, first_col;
  bool exists;
  Sums<Layout::width> sums;

  __device__ __forceinline__ Piece(const QuerySums<Br, d, dv>& in, int head, int tile, int part,
                                   int own)
      : head(head),
        first_row(tile * Br + own * step + (Layout::by_rows ? part * warpgroup_rows : 0)),
        first_col(Layout::by_columns ? part * Layout::width : 0) {
    const int M = in.repair.extent.M, heads = in.repair.stats.number.heads;
    exists = head < heads && first_row < M;
    if (!exists) return;
    const long long index = in.repair.stats.number(head, tile * Br);
    const int thread = own * warp_size + threadIdx.x % warp_size;
#pragma unroll
    for (int i = 0; i < Layout::width / 8; ++i) {
      const float4 four = __ldcg(&in.parts[index * Layout::count + part].fours[i][thread]);
      sums[4 * i] = four.x, sums[4 * i + 1] = four.y;
      sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void finish(const QuerySums<Br, d, dv>& in) const {
    const auto& repair = in.repair;
    if (!exists) return;
    if (all_finite(fragments(sums)))
      store_gradient<d>(fragments(sums), repair.scorer.scale, in.dQ, repair.batch, head, first_row,
                        repair.extent.M, threadIdx.x % warp_size, first_col);
    else
      repair_rows<Layout::width>(repair, in.dQ, head, first_row, first_row + step, first_col);
  }
};
