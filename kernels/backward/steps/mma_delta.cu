// mma_delta: `delta` with 16-byte loads, which also clears the dQ accumulators and the counts of
// blocks that share a group.
//
//   O, dO [batch, heads, M, dv]    D [batch, heads, M]    dQ_sum: `floats` per row tile
//   counts [counts_size]
//   grid (cdiv(M, Br) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, Br, floats, dv, threads, shared_bytes, has_dlse,
//   is_packed: a ragged batch has more tiles in dQ_sum than tiles of packed rows
#include <backward/parts/gradient_of_lse.cuh>
#include <backward/parts/row_product.cuh>

static_assert(shared_bytes == 0, "nothing is shared");
static_assert(threads % warp_size == 0, "lanes of a warp sum a row");
static_assert(floats % 4 == 0, "sums are cleared four at a time");

constexpr int chunks = cdiv(dv, 8);
constexpr int lanes = chunks <= 4 ? 4 : chunks <= 8 ? 8 : chunks <= 16 ? 16 : 32;  // lanes per row
constexpr int together = 4;  // rows per thread whose loads are in flight

extern "C" __global__ __launch_bounds__(threads) void mma_delta(Tensor<const result> O,
                                                                Tensor<const scalar> dO,
                                                                Tensor<real> D, float* dQ_sum,
                                                                int* counts, int counts_size, int M,
                                                                int heads, Mods mods) {
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(M, Br), heads);
  const int first_row = tile * Br;
  if constexpr (floats > 0) {
    float4* sums = reinterpret_cast<float4*>(dQ_sum + (long long)blockIdx.x * floats);
    for (int i = threadIdx.x; i < floats / 4; i += threads) sums[i] = float4{};
  }
#pragma unroll 1
  for (int i = blockIdx.x * threads + threadIdx.x; i < counts_size; i += gridDim.x * threads)
    counts[i] = 0;
#pragma unroll together
  for (int i = threadIdx.x / lanes; i < cdiv(Br, threads / lanes) * (threads / lanes);
       i += threads / lanes) {
    const int row = first_row + i;
    const bool inside = i < Br && row < M && (!is_packed || batch == 0);
    const float sum = row_product<dv, lanes>(O, dO, batch, head, row, inside);
    if (inside && threadIdx.x % lanes == 0)
      *D.row(batch, head, row) = sum - gradient_of_lse(mods, batch, head, row);
  }
}
