// Attention of one head with a bottom-right causal mask: one thread per row, one block per tile.

constexpr int Br = 32, Bc = 8, d = 8;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

// q, out [M, d]. k, v [N, d]. visited [blocks]: number of key tiles that each block loads.
extern "C" __global__ void causal(const float* q, const float* k, const float* v, float* out,
                                  int* visited, int M, int N, float scale) {
  __shared__ float K[Bc][d], V[Bc][d];
  const int first_row = blockIdx.x * Br, row = first_row + threadIdx.x;
  float Q[d], O[d] = {}, m = -infinity, l = 0;
  for (int c = 0; c < d; ++c) Q[c] = row < M ? q[row * d + c] : 0;

  // hole
  const int last_row = first_row + Br - 1;
  const int seen = row + 1 + N - M;                        // number of keys that this row sees
  const int tiles = (last_row + 1 + N - M + Bc - 1) / Bc;  // key tiles visible to the block
  // end

  for (int tile = 0; tile < tiles && tile * Bc < N; ++tile) {
    if (threadIdx.x == 0) ++visited[blockIdx.x];
    __syncthreads();
    for (int i = threadIdx.x; i < Bc * d; i += Br) {
      const int key = tile * Bc + i / d;
      K[i / d][i % d] = key < N ? k[key * d + i % d] : 0;
      V[i / d][i % d] = key < N ? v[key * d + i % d] : 0;
    }
    __syncthreads();
    for (int j = 0; j < Bc && tile * Bc + j < min(seen, N); ++j) {
      float score = 0;
      for (int c = 0; c < d; ++c) score += scale * Q[c] * K[j][c];
      const float largest = fmaxf(m, score), factor = expf(m - largest), p = expf(score - largest);
      m = largest;
      l = l * factor + p;
      for (int c = 0; c < d; ++c) O[c] = O[c] * factor + p * V[j][c];
    }
  }
  if (row >= M) return;
  // hole
  const float inverse = l > 0 ? 1 / l : 0;  // l is 0 if the row sees no key
  for (int c = 0; c < d; ++c) out[row * d + c] = O[c] * inverse;
  // end
}
