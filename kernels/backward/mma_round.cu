// mma_round: dQ from its finished sums, which lie in the order of mma_columns's registers.
//
//   dQ_sum: the tiles of rows, as red.cuh has them    lse [batch, heads, M]
//   dQ [batch, heads, M, d]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * warps)
//   the host sets: scalar, operand, real, Br, Bc, warps, stages, d, dv, threads, shared_bytes; Wr
//   and pack_gqa for row_state.cuh
#include <backward/parts/gradient_products.cuh>
#include <ptx/red.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void mma_round(const float* dQ_sum,
                                                                Tensor<const real> lse,
                                                                Tensor<scalar> dQ, int M, int heads,
                                                                real scale) {
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(M, Br), heads);
  const int lane = threadIdx.x % warp_size;
  constexpr int fours = QueryPart::fours, blocks = QueryPart::cols / 8;
  const float* from = dQ_sum + (long long)blockIdx.x * (query_slices * fours * 4 * threads);
  for (int slice = 0; slice < query_slices; ++slice) {
    const QueryPart own(slice);
    QueryPart::Sums sums;
#pragma unroll
    for (int i = 0; i < 2 * (QueryPart::rows / step); ++i) {
      const int row = tile * Br + own.row + i * 8 + lane / 4;
      const bool counts = row < M && *lse.row(batch, head, row) != -infinity;
#pragma unroll
      for (int j = 0; j < 2 * blocks; ++j) {
        const int four = slice * fours + i / 2 * blocks + j / 2;
        const float sum = from[place_of_sum(four, i % 2 * 2 + j % 2)];
        sums[i / 2][j / 2][i % 2 * 2 + j % 2] = counts ? sum : 0.0f;
      }
    }
    // What lies behind the end of a warp's part is another's, of the next slice.
    store_gradient<d>(dQ, sums, scale, own, batch, head, tile * Br, M, lane, own.end);
  }
}
