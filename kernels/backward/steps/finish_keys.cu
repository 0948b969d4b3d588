// finish_keys: adds up dV, or dK times the scale, of the query heads of each key head, and rounds
// it.
//
// The mirror image of `finish_rows`: sums that are NaN are recomputed from only the rows that see
// the key. `left` and `right` are dS and Q for dK, and P and dO for dV. With `continues`,
// `gradient` holds the sums of other query heads of the same key heads.
//
//   sums [batch, heads, N, width]    gradient [batch, kv_heads, N, width]
//   left [batch, heads, M, N]    right [batch, heads, M, width]    lse [batch, heads, M]
//   grid (max(cdiv(N * width, threads), 1) * kv_heads * batch)    block (threads)
//   the host sets: scalar, result, real, width, scaled, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/extent.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void finish_keys(
    Tensor<const real> sums, Tensor<result> gradient, Tensor<const scalar> left,
    Tensor<const scalar> right, Tensor<const real> lse, Sizes sizes, int kv_heads, int group,
    int continues, real scale) {
  const long long elements = (long long)sizes.N * width;
  const int tiles = max(int((elements + threads - 1) / threads), 1);
  const auto [tile, kv_head, batch] = place(blockIdx.x, tiles, kv_heads);
  const Extent extent = extent_of(sizes, batch);
  const long long i = (long long)tile * threads + threadIdx.x;
  if (i >= elements) return;
  const int key = int(i / width), col = int(i % width);

  real sum = 0;
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    real of_head = sums.row(batch, head, key)[col];
    if (isnan(of_head)) {
      of_head = 0;
      for (int row = 0; row < extent.M; ++row) {
        if (!extent.sees(row, key)) continue;
        if (*lse.row(batch, head, row) == -infinity) continue;
        of_head += real(left.row(batch, head, row)[key]) * real(right.row(batch, head, row)[col]);
      }
    }
    sum += of_head;
  }
  if (scaled) sum *= scale;
  result& out = gradient.row(batch, kv_head, key)[col];
  out = result(continues ? real(out) + sum : sum);
}
