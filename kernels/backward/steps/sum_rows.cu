// sum_rows: computes the row statistics that `wgmma_two_pass` reads, tile by tile: lse * log2(e)
// and D = rowsum(dO * O).
//
//   O, dO [batch, heads, M, dv]    lse [batch, heads, M]    row_sums [batch, heads, cdiv(M, Br)]
//   grid (cdiv(M, Br) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, Br, d, dv, threads, shared_bytes, has_dlse
#include <backward/parts/sum_tile.cuh>
#include <ptx/dependent_launch.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void sum_rows(Tensor<const result> O,
                                                               Tensor<const scalar> dO,
                                                               Tensor<const real> lse,
                                                               RowSums<Br>* row_sums, int M,
                                                               int heads, Mods mods) {
  launch_dependents();
  const auto [tile, head, batch] = place_of_sums<Br>(M, heads, mods);
  sum_tile<dv, threads>(O, dO, lse, row_sums[blockIdx.x], tile, head, batch, M, mods);
}
