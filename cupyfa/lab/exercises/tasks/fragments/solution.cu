// Scores S = Q Kᵀ of up to 16 rows on tensor cores: one warp issues 16 x 8 x 16 mma.sync.
#include <ptx/mma.cuh>

constexpr int rows = 16;  // rows of a 16 x 8 result of mma.sync
constexpr int d = 16;     // columns of Q and K, equal to the depth (k) of mma.sync
constexpr int keys = 16;  // keys per tile: two results of mma.sync, side by side

// Writes the four elements of a 16 x 8 result that this lane holds to S [M, N]. Column 0 of the
// result belongs to key first_key.
__device__ void store_scores(float* S, int M, int N, int first_key, const float (&result)[4]) {
  const int lane = threadIdx.x;
  // hole
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int key = first_key + lane % 4 * 2 + i % 2;
    if (row < M && key < N) S[row * N + key] = result[i];
  }
  // end
}

// Copies 16 rows of X [count, d] from row `first` on; rows past the end are zeros.
__device__ void load_tile(__half (&tile)[16][d], const __half* X, int first, int count) {
  for (int i = threadIdx.x; i < 16 * d; i += 32) {
    const int row = first + i / d;
    tile[i / d][i % d] = row < count ? X[row * d + i % d] : __float2half(0.0f);
  }
}

extern "C" __global__ void fragments(const __half* Q, const __half* K, float* S, int M, int N) {
  __shared__ __align__(16) __half Q_tile[rows][d], K_tile[keys][d];
  const int lane = threadIdx.x;
  load_tile(Q_tile, Q, 0, M);
  for (int first_key = 0; first_key < N; first_key += keys) {
    load_tile(K_tile, K, first_key, N);
    __syncwarp();
    unsigned a[4], b[4];  // Q; K of the tile's keys 0 … 7 and 8 … 15
    ldmatrix(a, &Q_tile[lane % 16][lane / 16 * 8]);
    ldmatrix(b, &K_tile[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    float left[4] = {}, right[4] = {};
    multiply_add<__half>(left, a, b[0], b[1]);
    multiply_add<__half>(right, a, b[2], b[3]);
    store_scores(S, M, N, first_key, left);
    store_scores(S, M, N, first_key + 8, right);
    __syncwarp();
  }
}
