// finish_rows: multiplies dQ by the scale and rounds it to the dtype of the inputs.
//
// The product dS K multiplies K by the zeros of masked pairs, but 0 * NaN and 0 * infinity are NaN.
// Elements that are NaN are therefore recomputed from only the keys that the row sees.
//
//   dQ_sum, dQ [batch, heads, M, d]    dS [batch, heads, M, N]    K [batch, kv_heads, N, d]
//   lse [batch, heads, M]
//   grid (max(cdiv(M * d, threads), 1) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, d, threads, shared_bytes and options (extent.cuh)
#include <attention/extent.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void finish_rows(
    Tensor<const real> dQ_sum, Tensor<result> dQ, Tensor<const scalar> dS, Tensor<const scalar> K,
    Tensor<const real> lse, Sizes sizes, int heads, int group, real scale) {
  const long long elements = (long long)sizes.M * d;
  const int tiles = max(int((elements + threads - 1) / threads), 1);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads);
  const Extent extent = extent_of(sizes, batch);
  const long long i = (long long)tile * threads + threadIdx.x;
  if (i >= elements) return;
  const int row = int(i / d), col = int(i % d);

  real sum = dQ_sum.row(batch, head, row)[col];
  if (isnan(sum)) {
    sum = 0;
    const bool counts = *lse.row(batch, head, row) != -infinity;
    const int end = counts ? extent.kv_end(row) : 0;
    for (int key = extent.kv_begin(row); key < end; ++key) {
      const real value = real(K.row(batch, head / group, key)[col]);
      sum += real(dS.row(batch, head, row)[key]) * value;
    }
  }
  dQ.row(batch, head, row)[col] = result(sum * scale);
}
