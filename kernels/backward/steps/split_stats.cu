// split_stats: packs the row statistics for the dK/dV pass of `wgmma_fp16x2_two_pass`, so that one
// copy loads the statistics of a tile.
//
//   lse, delta, scale2, dO_units, flags [batch, heads, M]    stats [batch, heads, cdiv(M, Br), Br]
//   grid (cdiv(M, Br) * heads * batch)    block (Br)
//   the host sets: scalar, real, Br, d, dv, threads, shared_bytes and options (extent.cuh)
#include <backward/parts/place_of_sums.cuh>
#include <backward/parts/split_f32/load_split_stats.cuh>

static_assert(shared_bytes == 0, "nothing is shared");
static_assert(threads == Br, "one thread per row");

extern "C" __global__ __launch_bounds__(threads) void split_stats(
    Tensor<const real> lse, Tensor<const real> delta, Tensor<const real> scale2,
    Tensor<const real> dO_units, Tensor<const unsigned char> flags, SplitStats* stats, int M,
    int heads, Mods mods) {
  const auto [tile, head, batch] = place_of_sums<Br>(M, heads, mods);
  const int row = tile * Br + threadIdx.x;
  const SplitStatsInMemory found = {lse, delta, scale2, dO_units, flags, batch};
  stats[(long long)blockIdx.x * Br + threadIdx.x] =
      row < M ? found(head, row) : SplitStats{infinity, 0, 0, 0};
}
