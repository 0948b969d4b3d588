// NAME: attention with damped scores, one thread per row of Q.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (Br)
//   the host sets: scalar, real, Br, d, dv, threads, causal, windowed
#include <attention/extent.cuh>
#include <attention/online_softmax.cuh>
#include <tile/tensor.cuh>

// Modifies a scaled score. Change the formula here and in the file of the record, whose reference
// checks the results. A modification that depends on positions needs `row` and `key` as arguments.
__device__ real modified(real score, real limit) {
  return score / (1 + fabs(score) / limit);
}

// The parameters match `args` in the record, in the same order; change both together.
extern "C" __global__ __launch_bounds__(threads) void NAME_forward(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<scalar> O,
    Tensor<real> lse, Sizes sizes, int heads, int group, real scale, real limit) {
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(sizes.M, Br), heads);
  const Extent extent = extent_of(sizes, batch);  // the range of keys visible to a row
  const int row = tile * Br + threadIdx.x, kv_head = head / group;
  if (row >= extent.M) return;  // past the last row; not allowed before __syncthreads()

  // Exponentials are relative to the running maximum of the scores, so that exp cannot overflow.
  OnlineSoftmax softmax;
  real sums[dv] = {};
  for (int key = extent.kv_begin(row); key < extent.kv_end(row); ++key) {
    // Sums accumulate in `real`, which is float for 16-bit dtypes, to limit rounding errors. The
    // first optimization would be tiles of K and V in shared memory, shared by the block's rows.
    real product = 0;
    for (int i = 0; i < d; ++i)
      product += real(Q.row(batch, head, row)[i]) * real(K.row(batch, kv_head, key)[i]);
    const real score = modified(product * scale, limit);

    const real factor = softmax.raise(score);  // below 1 if this score raises the maximum
    const real p = softmax.p(score);
    softmax.sum += p;
    for (int i = 0; i < dv; ++i)
      sums[i] = sums[i] * factor + p * real(V.row(batch, kv_head, key)[i]);
  }
  for (int i = 0; i < dv; ++i) O.row(batch, head, row)[i] = scalar(sums[i] * softmax.inverse_sum());
  *lse.row(batch, head, row) = softmax.lse();  // log-sum-exp, from which gradients recompute P
}
