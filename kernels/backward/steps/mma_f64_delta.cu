// mma_f64_delta: `delta`, which also clears the dQ accumulators and the counts of blocks that share
// a group.
//
//   O, dO [batch, heads, M, dv]    D [batch, heads, M]    dQ_sum: `doubles` per row tile
//   counts [counts_size]
//   grid (cdiv(M, Br) * heads * batch)    block (threads), a warp for each row
//   the host sets: scalar, result, real, Br, doubles, dv, threads, shared_bytes, has_dlse,
//   is_packed: a ragged batch has more tiles in dQ_sum than tiles of packed rows
#include <backward/parts/gradient_of_lse.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

static_assert(shared_bytes == 0, "nothing is shared");
static_assert(threads % warp_size == 0, "a warp sums a row");

extern "C" __global__ __launch_bounds__(threads) void mma_f64_delta(Tensor<const result> O,
                                                                    Tensor<const scalar> dO,
                                                                    Tensor<real> D, real* dQ_sum,
                                                                    int* counts, int counts_size,
                                                                    int M, int heads, Mods mods) {
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(M, Br), heads);
  for (int i = threadIdx.x; i < doubles; i += threads)
    dQ_sum[(long long)blockIdx.x * doubles + i] = 0;
  for (int i = blockIdx.x * threads + threadIdx.x; i < counts_size; i += gridDim.x * threads)
    counts[i] = 0;
  if (is_packed && batch > 0) return;
  const int lane = threadIdx.x % warp_size, end = min((tile + 1) * Br, M);
  for (int row = tile * Br + threadIdx.x / warp_size; row < end; row += threads / warp_size) {
    const result* output = O.row(batch, head, row);
    const scalar* gradient = dO.row(batch, head, row);
    real sum = 0;
    for (int col = lane; col < dv; col += warp_size) sum += real(output[col]) * real(gradient[col]);
    sum = warp_sum(sum);
    if (lane == 0) *D.row(batch, head, row) = sum - gradient_of_lse(mods, batch, head, row);
  }
}
