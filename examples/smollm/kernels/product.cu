// product: out[row, n] = sum over k of y[row, k] * w[n, k], for few rows. One warp computes one n
// and reads its row of w once, 16 bytes per thread and load. y is x, or if `normalizes` its RMS
// norm, x / sqrt(mean(x^2) + epsilon) * norm, whose factor is applied to the sum. If `gated`, row n
// + N of w gives a second sum, and out is silu(first) * second. If `adds`, out += sum.
//
//   x [rows, K], norm [K], w [N or 2 N, K], out [rows, N]
//   grid (cdiv(N, block.y), rows)    block (32, warps)
//   the host sets: scalar, input, output, K, normalizes, gated, adds, epsilon
constexpr int many = 16 / sizeof(scalar), length = K / many, steps = (length + 31) / 32;

template <class T>
struct alignas(many * sizeof(T)) Many {
  T at[many];
};

extern "C" __global__ void product(const Many<input>* x, const Many<float>* norm,
                                   const Many<scalar>* w, output* out, int N) {
  const int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
  if (n >= N) return;
  w += (long long)n * length, x += blockIdx.y * length, out += (long long)blockIdx.y * N + n;
  Many<scalar> a[steps], b[steps];  // all loads start before the first number is used
  for (int step = 0, k = lane; step < steps; ++step, k += 32)
    if (k < length) a[step] = w[k], b[step] = w[k + (gated ? (long long)N * length : 0)];
  float sum = 0, second = 0, squares = 0;
  for (int step = 0, k = lane; step < steps; ++step, k += 32)
    for (int i = 0; i < many && k < length; ++i) {
      float y = number(x[k].at[i]);
      squares += y * y;
      if (normalizes) y *= norm[k].at[i];
      sum += y * number(a[step].at[i]), second += y * number(b[step].at[i]);
    }
  sum = warp_sum(sum), second = warp_sum(second), squares = warp_sum(squares);
  const float factor = normalizes ? rsqrtf(squares / K + epsilon) : 1;
  sum *= factor, second *= factor;
  if (gated) sum = sum / (1 + expf(-sum)) * second;
  if (lane == 0) store(out, adds ? number(*out) + sum : sum);
}
