// Gradients of the dot products q·k. A block has 8 x 8 threads, one per row and key of a tile.

constexpr int d = 8;  // columns of Q, K, V and dO
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

__device__ float dot(const float* x, const float* y) {
  float sum = 0.0f;
  for (int i = 0; i < d; ++i) sum += x[i] * y[i];
  return sum;
}

// Q, dO [M, d], K, V [N, d], lse, D [M], gradients [M, N]
extern "C" __global__ void score_gradients(const float* Q, const float* K, const float* V,
                                           const float* dO, const float* lse, const float* D,
                                           float* gradients, int M, int N, int causal,
                                           float scale) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int key = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= M || key >= N) return;
  const bool visible = !causal || key <= row + N - M;
  const float product = dot(Q + row * d, K + key * d);
  const float dP = dot(dO + row * d, V + key * d);
  float gradient = 0.0f;
  // hole
  if (visible) {
    const float P = expf(scale * product - lse[row]);
    gradient = scale * P * (dP - D[row]);
  }
  // end
  gradients[row * N + key] = gradient;
}
