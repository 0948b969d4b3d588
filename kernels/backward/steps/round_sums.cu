// round_sums: rounds an accumulated gradient to the dtype of the inputs, multiplied by the scale if
// `scaled` is set.
//
//   sums, gradient [batch, heads, rows, width]
//   grid (max(cdiv(rows * width, threads), 1) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, width, scaled, threads, shared_bytes
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void round_sums(Tensor<const real> sums,
                                                                 Tensor<result> gradient, int rows,
                                                                 int heads, real scale) {
  const long long elements = (long long)rows * width;
  const int tiles = max(int((elements + threads - 1) / threads), 1);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads);
  const long long i = (long long)tile * threads + threadIdx.x;
  if (i >= elements) return;
  const int row = int(i / width), col = int(i % width);
  const real sum = sums.row(batch, head, row)[col];
  gradient.row(batch, head, row)[col] = result(scaled ? sum * scale : sum);
}
