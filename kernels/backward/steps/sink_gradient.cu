// sink_gradient: computes the gradient of sinks, which have a weight in every row but no value.
//
// dsink = -sum of exp(sink - lse) * D over the rows of a head, with D = rowsum(dO * O) - dlse as in
// delta.cu. For sinks [heads] it also sums over the batch. The order of each sum is fixed.
//
//   O, dO [batch, heads, M, dv]    lse [batch, heads, M]    d_sink: shape of the sinks
//   grid (heads, batch of the sinks)    block (threads), a warp for each row
//   the host sets: scalar, result, real, dv, threads, shared_bytes, has_dlse
#include <attention/weight.cuh>
#include <backward/parts/gradient_of_lse.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

static_assert(shared_bytes == 0, "only the warps' sums are in shared memory");

using Element = decltype(Mods::sink_)::Type;

extern "C" __global__ __launch_bounds__(threads) void sink_gradient(Tensor<const result> O,
                                                                    Tensor<const scalar> dO,
                                                                    Tensor<const real> lse,
                                                                    Element* d_sink, int M,
                                                                    int batch, Mods mods) {
  constexpr int warps = threads / warp_size;
  __shared__ real sums[warps];
  const int head = blockIdx.x, warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int first = blockIdx.y, end = gridDim.y > 1 ? first + 1 : batch;
  real total = 0;
  for (int b = first; b < end; ++b) {
    const real sink = sink_of(mods.sink_, b, head);
    for (int row = warp; row < M; row += warps) {
      const result* output = O.row(b, head, row);
      const scalar* gradient = dO.row(b, head, row);
      real delta = 0;
      for (int col = lane; col < dv; col += warp_size)
        delta += real(output[col]) * real(gradient[col]);
      delta = warp_sum(delta) - gradient_of_lse(mods, b, head, row);
      const real sum = *lse.row(b, head, row);
      if (sum != -infinity) total -= weight_of(sink, sum) * delta;
    }
  }
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < warps; ++i) total += sums[i];
  d_sink[blockIdx.y * gridDim.x + head] = Element(total);
}
