// finish_dQ: scales and writes dQ of `wgmma_columns`, where the blocks of that kernel do not do so
// themselves.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(sizes.M, Br)]    dQ_sum [batch, heads, cdiv(sizes.M, Br), parts]
//   grid (cdiv(M, Br) * heads * batch, parts)    block (threads)
//   the host sets: scalar, result, real, Br, Bc, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <attention/tile_index.cuh>
#include <backward/parts/finish_dQ.cuh>
#include <ptx/dependent_launch.cuh>

using Part = RegisterTile<QueryLayout<Br, d, dv>::width>;
using Rows = Piece<Br, d, dv>;
static_assert(shared_bytes == 0, "nothing is shared");
static_assert(threads == Rows::in_part * warp_size, "each warp finishes one piece");

extern "C" __global__ __launch_bounds__(threads) void finish_dQ(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<result> dQ, Tensor<const real> lse, const RowSums<Br>* row_sums, const Part* dQ_sum,
    Sizes sizes, int heads, int group, real scale, Mods mods) {
  const auto [tile, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  wait_for_launch_before();
  if (ragged) launch_dependents();  // clear_rest follows
  if (!extent.has_tile_of_rows(tile * Br)) return;
  const Repair<d, dv, scalar, StatsOfTiles<Br>> repair = {
      extent,
      Q,
      K,
      V,
      dO,
      {row_sums, tiles_of<Br>(mods, batch, heads, sizes.M), lse, batch},
      {scale, mods},
      batch,
      head / group};
  const QuerySums<Br, d, dv> in = {repair, dQ_sum, dQ};
  Rows(in, head, tile, blockIdx.y, threadIdx.x / warp_size).finish(in);
}
