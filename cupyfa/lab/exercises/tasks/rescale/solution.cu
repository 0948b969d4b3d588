// Attention of one head (FlashAttention 2): each thread owns a row of Q, its block shares K and V.

constexpr int Br = 32, Bc = 4, d = 8;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

// q, out [M, d]. k, v [N, d]. lse [M].
extern "C" __global__ void rescale(const float* q, const float* k, const float* v, float* out,
                                   float* lse, int M, int N, float scale) {
  __shared__ float K[Bc][d], V[Bc][d];
  const int row = blockIdx.x * Br + threadIdx.x;
  float Q[d], O[d] = {}, m = -infinity, l = 0;
  for (int c = 0; c < d; ++c) Q[c] = row < M ? q[row * d + c] : 0;

  for (int first_key = 0; first_key < N; first_key += Bc) {
    __syncthreads();
    for (int i = threadIdx.x; i < Bc * d; i += Br) {
      const bool exists = first_key + i / d < N;
      K[i / d][i % d] = exists ? k[first_key * d + i] : 0;
      V[i / d][i % d] = exists ? v[first_key * d + i] : 0;
    }
    __syncthreads();

    float S[Bc];  // scores of this row and tile; -infinity for keys from N on
    for (int j = 0; j < Bc; ++j) {
      float dot = 0;
      for (int c = 0; c < d; ++c) dot += Q[c] * K[j][c];
      S[j] = first_key + j < N ? scale * dot : -infinity;
    }
    // hole
    float largest = m;
    for (int j = 0; j < Bc; ++j) largest = fmaxf(largest, S[j]);
    const float factor = expf(m - largest);
    m = largest;
    l *= factor;
    for (int c = 0; c < d; ++c) O[c] *= factor;
    for (int j = 0; j < Bc; ++j) {
      const float p = expf(S[j] - m);
      l += p;
      for (int c = 0; c < d; ++c) O[c] += p * V[j][c];
    }
    // end
  }
  if (row < M) {
    for (int c = 0; c < d; ++c) out[row * d + c] = O[c] / l;
    lse[row] = m + logf(l);
  }
}
