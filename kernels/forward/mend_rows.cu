// mend_rows: what a masked NaN did to the rows of the baseline.
//
// Multiplying P and V as whole matrices also multiplies the zero weights of masked keys with their
// values, and 0 * NaN is NaN, so is 0 * infinity. Elements of O that came out as NaN are summed
// again over the visible keys alone; the others are only read.
//
//   P [batch, heads, M, N]    V [batch, kv_heads, N, dv]    O [batch, heads, M, dv]
//   grid (M * heads * batch)    block (threads)
//   the host sets: scalar, real, dv, causal, windowed, threads, shared_bytes
#include <attention/mask.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void mend_rows(
    Tensor<const scalar> P, Tensor<const scalar> V, Tensor<scalar> O, int M, int N, int heads,
    int group, int causal_offset, int window_offset) {
  const auto [row, head, batch] = place(blockIdx.x, M, heads);
  const scalar* weights = P.row(batch, head, row);
  scalar* output = O.row(batch, head, row);

  for (int col = threadIdx.x; col < dv; col += threads) {
    if (!isnan(real(output[col]))) continue;
    real sum = 0;
    for (int key = kv_begin(row, N, window_offset); key < kv_end(row, N, causal_offset); ++key) {
      sum += real(weights[key]) * real(V.row(batch, head / group, key)[col]);
    }
    output[col] = scalar(sum);
  }
}
