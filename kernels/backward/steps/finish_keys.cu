// finish_keys: rounds dV, or dK times the scale, to the dtype of the inputs.
//
// The mirror image of `finish_rows`: elements that are NaN are recomputed from only the rows that
// see the key, in all query heads of the group. `left` and `right` are dS and Q for dK, and P and
// dO for dV.
//
//   sums, gradient [batch, kv_heads, N, width]    left [batch, heads, M, N]
//   right [batch, heads, M, width]    lse [batch, heads, M]
//   grid (max(cdiv(N * width, threads), 1) * kv_heads * batch)    block (threads)
//   the host sets: scalar, result, real, width, scaled, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/extent.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void finish_keys(
    Tensor<const real> sums, Tensor<result> gradient, Tensor<const scalar> left,
    Tensor<const scalar> right, Tensor<const real> lse, Sizes sizes, int kv_heads, int group,
    real scale) {
  const long long elements = (long long)sizes.N * width;
  const int tiles = max(int((elements + threads - 1) / threads), 1);
  const auto [tile, kv_head, batch] = place(blockIdx.x, tiles, kv_heads);
  const Extent extent = extent_of(sizes, batch);
  const long long i = (long long)tile * threads + threadIdx.x;
  if (i >= elements) return;
  const int key = int(i / width), col = int(i % width);

  real sum = sums.row(batch, kv_head, key)[col];
  if (isnan(sum)) {
    sum = 0;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int row = 0; row < extent.M; ++row) {
        if (!extent.sees(row, key)) continue;
        if (*lse.row(batch, head, row) == -infinity) continue;
        sum += real(left.row(batch, head, row)[key]) * real(right.row(batch, head, row)[col]);
      }
    }
  }
  gradient.row(batch, kv_head, key)[col] = result(scaled ? sum * scale : sum);
}
