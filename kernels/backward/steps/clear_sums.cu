// clear_sums: clears accumulators in global memory to which many blocks add.
//
//   sums [batch, heads, rows, width]
//   grid (max(cdiv(rows * width, threads), 1) * heads * batch)    block (threads)
//   the host sets: real, width, threads, shared_bytes
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void clear_sums(Tensor<real> sums, int rows,
                                                                 int heads) {
  const long long elements = (long long)rows * width;
  const int tiles = max(int((elements + threads - 1) / threads), 1);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads);
  const long long i = (long long)tile * threads + threadIdx.x;
  if (i < elements) sums.row(batch, head, int(i / width))[i % width] = 0;
}
