// product: out[row, n] = sum over k of y[row, k] * w[n, k], for few rows. A warp holds `at_once`
// rows of w, and loads them before the launch before has ended. y is x or, if `normalizes`, its RMS
// norm. If `gated`, rows n and n + N of w are held, and out is silu(first) * second. If `adds`, the
// sum is added to out. `ahead` bytes after w, which later launches read, come to the L2 cache.
//   x [rows, K], norm [K], w [N or 2 N, K], out [rows, N]    grid (cdiv(N, outputs of a block))
constexpr int many = 16 / sizeof(scalar), length = K / many, steps = (length + 31) / 32;

extern "C" __global__ void product(const Several<input, many>* x, const Several<float, many>* norm,
                                   const Several<scalar, many>* w, output* out, int N) {
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
  for (int at = 128 * (blockIdx.x * blockDim.x + threadIdx.x); at < ahead;
       at += 128 * gridDim.x * blockDim.x)
    prefetch<early>((const char*)(w + N * length) + at);
  wait_for_launch_before<early>();
  for (int row = 0; row < rows; ++row) {
    float sums[at_once] = {}, squares = 0;
    for (int step = 0, k = lane; step < steps; ++step, k += 32)
      for (int j = 0; j < many && k < length; ++j) {
        float y = number(x[row * length + k].at[j]);
        squares += y * y;
        if (normalizes) y *= scale[step].at[j];
        for (int i = 0; i < at_once; ++i) sums[i] += y * number(a[i][step].at[j]);
      }
    const float factor = normalizes ? rsqrtf(warp_sum(squares) / K + epsilon) : 1;
    for (int i = 0; i < at_once; ++i) sums[i] = factor * warp_sum(sums[i]);
    if (gated) sums[0] = sums[0] / (1 + expf(-sums[0])) * sums[at_once - 1];
    for (int i = 0; i < made && n + i < N && lane == 0; ++i)
      store(&out[row * N + n + i], adds ? number(out[row * N + n + i]) + sums[i] : sums[i]);
  }
}
