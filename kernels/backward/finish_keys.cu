// finish_keys: the sums of dK, times the scale, or of dV, in the dtype of the inputs.
//
// The mirror image of `finish_rows`: elements that came out as NaN are summed again over the rows
// that see the key, of all heads that share it. `weights` is dS and `values` Q for dK; P and dO for
// dV.
//
//   sums, gradient [batch, kv_heads, N, width]    weights [batch, heads, M, N]
//   values [batch, heads, M, width]    lse [batch, heads, M]
//   grid (max(cdiv(N * width, threads), 1) * kv_heads * batch)    block (threads)
//   the host sets: scalar, real, width, scaled, causal, windowed, threads, shared_bytes
#include <attention/mask.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void finish_keys(
    Tensor<const real> sums, Tensor<scalar> gradient, Tensor<const scalar> weights,
    Tensor<const scalar> values, Tensor<const real> lse, int M, int N, int kv_heads, int group,
    int causal_offset, int window_offset, real scale) {
  const long long elements = (long long)N * width;
  const int tiles = max(int((elements + threads - 1) / threads), 1);
  const auto [tile, kv_head, batch] = place(blockIdx.x, tiles, kv_heads);
  const long long i = (long long)tile * threads + threadIdx.x;
  if (i >= elements) return;
  const int key = int(i / width), col = int(i % width);

  real sum = sums.row(batch, kv_head, key)[col];
  if (isnan(sum)) {
    sum = 0;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int row = 0; row < M; ++row) {
        if (!sees_key(row, key, N, causal_offset, window_offset)) continue;
        if (*lse.row(batch, head, row) == -infinity) continue;
        sum += real(weights.row(batch, head, row)[key]) * real(values.row(batch, head, row)[col]);
      }
    }
  }
  gradient.row(batch, kv_head, key)[col] = scalar(scaled ? sum * scale : sum);
}
