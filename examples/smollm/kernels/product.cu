// product: out[row, n] = sum over k of y[row, k] * w[n, k], for few rows. A warp holds `at_once`
// rows of w in registers, and starts to load them before the launch before has ended. y is x or, if
// `normalizes`, its RMS norm, whose factor is applied to the sum. If `gated`, rows n and n + N of w
// are held, and out is silu(first) * second. If `adds`, the sum is added to out.
//   x [rows, K], norm [K], w [N or 2 N, K], out [rows, N]
//   grid (cdiv(N, outputs of a block), cdiv(rows, 4))    block (32 * warps)
//   the host sets: scalar, input, output, K, at_once, normalizes, gated, adds, early, epsilon
constexpr int many = 16 / sizeof(scalar), length = K / many, steps = (length + 31) / 32;

extern "C" __global__ void product(const Several<input, many>* x, const Several<float, many>* norm,
                                   const Several<scalar, many>* w, output* out, int N, int rows) {
  constexpr int made = gated ? 1 : at_once;
  const int lane = threadIdx.x % 32, n = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * made;
  Several<scalar, many> a[at_once][steps];
  Several<float, many> scale[steps];
  launch_dependents<early>();
  for (int step = 0, k = lane; step < steps; ++step, k += 32) {
    for (int i = 0; i < at_once && k < length; ++i)
      if (n + (gated ? 0 : i) < N) a[i][step] = w[(n + i * (gated ? N : 1ll)) * length + k];
    if (normalizes && k < length) scale[step] = norm[k];
  }
  wait_for_launch_before<early>();
  for (int row = 4 * blockIdx.y; row < min(rows, 4 * (int)blockIdx.y + 4); ++row) {
    float sums[at_once] = {}, squares = 0;
    for (int step = 0, k = lane; step < steps; ++step, k += 32)
      for (int j = 0; j < many && k < length; ++j) {
        float y = number(x[(long long)row * length + k].at[j]);
        squares += y * y;
        if (normalizes) y *= scale[step].at[j];
        for (int i = 0; i < at_once; ++i) sums[i] += y * number(a[i][step].at[j]);
      }
    const float factor = normalizes ? rsqrtf(warp_sum(squares) / K + epsilon) : 1;
    for (int i = 0; i < at_once; ++i) sums[i] = factor * warp_sum(sums[i]);
    if (gated) sums[0] = sums[0] / (1 + expf(-sums[0])) * sums[at_once - 1];
    for (int i = 0; i < made && n + i < N && lane == 0; ++i) {
      output* to = out + (long long)row * N + n + i;
      store(to, adds ? number(*to) + sums[i] : sums[i]);
    }
  }
}
