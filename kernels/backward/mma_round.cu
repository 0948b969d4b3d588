// mma_round: dQ from its finished sums, which lie in the order of mma_columns's registers.
//
//   dQ_sum: the tiles of rows, as sums.cuh has them    lse [batch, heads, M]
//   dQ [batch, heads, M, d]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * warps)
//   the host sets: scalar, operand, real, Br, Bc, warps, stages, d, dv, threads, shared_bytes; Wr
//   and packed for fragments.cuh
#include <gradient_products.cuh>
#include <sums.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void mma_round(const float* dQ_sum,
                                                                Tensor<const real> lse,
                                                                Tensor<scalar> dQ, int M, int heads,
                                                                real scale) {
  using Queries = Part<Br, depth>;
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(M, Br), heads);
  const int lane = threadIdx.x % warp_size;
  const float* from = dQ_sum + (long long)blockIdx.x * (Queries::fours * 4 * threads);
  const Queries own;
  Queries::Sums sums;
#pragma unroll
  for (int i = 0; i < Queries::rows / step; ++i) {
#pragma unroll
    for (int n = 0; n < Queries::cols / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = tile * Br + own.row + i * step + e / 2 * 8 + lane / 4;
        const bool counts = row < M && *lse.row(batch, head, row) != -infinity;
        const float sum = from[place_of_sum(i * (Queries::cols / 8) + n, e)];
        sums[i][n][e] = counts ? sum : 0.0f;
      }
    }
  }
  store_gradient<d>(dQ, sums, scale, own, batch, head, tile * Br, M, lane);
}
