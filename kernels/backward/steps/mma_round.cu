// mma_round: scales and writes dQ of mma_columns or mma_f64_columns, whose accumulators are in
// global memory in register order.
//
//   dQ_sum: row tiles in the layout of red.cuh    lse, delta [batch, heads, M]
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * warps)
//   the host sets: scalar, result, operand, real, Br, Bc, warps, d, dv, threads, shared_bytes and
//   options (extent.cuh)
#include <attention/tile_index.cuh>
#include <backward/parts/query_partition.cuh>
#include <backward/parts/repair_rows.cuh>
#include <backward/parts/stats_in_memory.cuh>
#include <backward/parts/store_doubles.cuh>
#include <backward/parts/store_gradient.cuh>
#include <ptx/red.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

constexpr int depth = cdiv(d, step) * step;
constexpr int query_slices = depth > 128 ? 2 : 1;
using Queries = QueryPartition<Br, depth, warps, query_slices>;

extern "C" __global__ __launch_bounds__(threads) void mma_round(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, const real* dQ_sum,
    Tensor<result> dQ, Sizes sizes, int heads, int group, real scale, Mods mods) {
  const auto [tile, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  if (!extent.has_tile_of_rows(tile * Br)) return;
  constexpr int fours = Queries::fours, blocks = Queries::cols / 8;
  const real* from = dQ_sum + (long long)blockIdx.x * (query_slices * fours * 4 * threads);
  for (int slice = 0; slice < query_slices; ++slice) {
    const Queries own(slice);
    Queries::Sums sums;
#pragma unroll
    for (int n = 0; n < fours; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[n / blocks][n % blocks][e] = from[place_of_sum<threads>(slice * fours + n, e)];
    }
    if (all_finite(sums)) {
      // Columns past the end of a warp's part belong to another warp in the next slice.
      store_gradient<d>(sums, scale, dQ, batch, head, tile * Br + own.row, extent.M,
                        threadIdx.x % warp_size, own.col, own.end);
      continue;
    }
    const Repair<d, dv, operand, StatsInMemory> repair = {
        extent, Q, K, V, dO, {lse, delta, batch}, {scale, mods}, batch, head / group};
    const int first = tile * Br + own.row;
    repair_rows<Queries::cols>(repair, dQ, head, first, first + Queries::rows, own.col, own.end);
  }
}
