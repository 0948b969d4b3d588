// sum_rows: computes the row statistics that `wgmma_two_pass` reads, tile by tile: lse * log2(e)
// and D = rowsum(dO * O). Clears the counts of blocks that share a group.
//
//   O, dO [batch, heads, M, dv]    lse [batch, heads, M]    row_sums [batch, heads, cdiv(M, Br)]
//   counts [counts_size]
//   grid (cdiv(M, Br) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, Br, d, dv, threads, shared_bytes, has_dlse
#include <backward/parts/sum_tile.cuh>
#include <ptx/dependent_launch.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void sum_rows(
    Tensor<const result> O, Tensor<const scalar> dO, Tensor<const real> lse, RowSums<Br>* row_sums,
    int* counts, int counts_size, int M, int heads, Mods mods) {
  launch_dependents();
#pragma unroll 1
  for (int i = blockIdx.x * threads + threadIdx.x; i < counts_size; i += gridDim.x * threads)
    counts[i] = 0;
  const auto [tile, head, batch] = place_of_sums<Br>(M, heads, mods);
  sum_tile<dv, threads>(O, dO, lse, row_sums[blockIdx.x], tile, head, batch, M, mods);
}
