#pragma once
// Computes lse * log2(e) and D = rowsum(dO * O) - dlse for the rows of a tile.

#include <backward/parts/gradient_of_lse.cuh>
#include <backward/parts/place_of_sums.cuh>
#include <backward/parts/row_product.cuh>
#include <backward/parts/row_sums.cuh>

// Several lanes share a row, and the block processes all rows of the tile at once, so that all
// loads are in flight together.
template <int dv, int threads, int Br>
__device__ __forceinline__ void sum_tile(Tensor<const result> O, Tensor<const scalar> dO,
                                         Tensor<const real> lse, RowSums<Br>& sums, int tile,
                                         int head, int batch, int M, const Mods& mods) {
  constexpr int lanes = threads / Br;
  static_assert(threads == lanes * Br && warp_size % lanes == 0, "a row's lanes are in one warp");
  const int own = threadIdx.x / lanes, row = tile * Br + own;
  const real own_lse = row < M ? *lse.row(batch, head, row) : -infinity;
  const float delta = row_product<dv, lanes>(O, dO, batch, head, row, row < M);
  if (threadIdx.x % lanes != 0) return;
  const int first = packed ? lse.first_rows()[batch] : 0;  // the sequence's first row
  const float dlse =
      row < M ? gradient_of_lse(mods, packed ? 0 : batch, head, first + row) : real(0);
  const RowStats stats = row_stats({own_lse, delta - dlse});
  sums.lse2[own] = stats.lse2;
  sums.delta[own] = stats.delta;
}
