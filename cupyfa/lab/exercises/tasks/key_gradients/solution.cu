// dQ, dK and dV of attention without a mask. A block owns a tile of keys and loops over the rows.

constexpr int d = 8;         // columns of Q, K, V and their gradients
constexpr int Br = 8;        // rows per tile
constexpr int Bc = 8;        // keys per tile
constexpr int threads = 64;  // equal to Br * Bc, Br * d and Bc * d

__device__ float dot(const float (&x)[d], const float (&y)[d]) {
  float sum = 0.0f;
  for (int i = 0; i < d; ++i) sum += x[i] * y[i];
  return sum;
}

// Copies eight rows of X [count, d] from row `first` on; rows past the end are zeros.
__device__ void load_tile(float (&tile)[8][d], const float* X, int first, int count) {
  const int i = threadIdx.x / d, column = threadIdx.x % d;
  tile[i][column] = first + i < count ? X[(first + i) * d + column] : 0.0f;
}

// Q, dO, dQ [M, d], K, V, dK, dV [N, d], lse, D [M]; dQ is 0 before the launch.
extern "C" __global__ void key_gradients(const float* Q, const float* K, const float* V,
                                         const float* dO, const float* lse, const float* D,
                                         float* dQ, float* dK, float* dV, int M, int N,
                                         float scale) {
  __shared__ float Q_tile[Br][d], dO_tile[Br][d], K_tile[Bc][d], V_tile[Bc][d];
  __shared__ float P[Br][Bc], dS[Br][Bc];
  const int first_key = blockIdx.x * Bc;
  const int i = threadIdx.x / 8, j = threadIdx.x % 8;
  load_tile(K_tile, K, first_key, N);
  load_tile(V_tile, V, first_key, N);
  float dK_sum = 0.0f, dV_sum = 0.0f;  // for key i and column j
  for (int first_row = 0; first_row < M; first_row += Br) {
    load_tile(Q_tile, Q, first_row, M);
    load_tile(dO_tile, dO, first_row, M);
    __syncthreads();
    const int row = first_row + i;
    const bool exists = row < M && first_key + j < N;  // else P and dS are 0
    P[i][j] = exists ? expf(scale * dot(Q_tile[i], K_tile[j]) - lse[row]) : 0.0f;
    dS[i][j] = exists ? P[i][j] * (dot(dO_tile[i], V_tile[j]) - D[row]) : 0.0f;
    // hole
    __syncthreads();
    for (int r = 0; r < Br; ++r) {
      dV_sum += P[r][i] * dO_tile[r][j];
      dK_sum += scale * dS[r][i] * Q_tile[r][j];
    }
    float dQ_sum = 0.0f;
    for (int c = 0; c < Bc; ++c) dQ_sum += dS[i][c] * K_tile[c][j];
    if (row < M) atomicAdd(&dQ[row * d + j], scale * dQ_sum);
    __syncthreads();
    // end
  }
  if (first_key + i < N) {
    dK[(first_key + i) * d + j] = dK_sum;
    dV[(first_key + i) * d + j] = dV_sum;
  }
}
