// One warp computes O = exp(Q Kᵀ) V for 16 rows on tensor cores. The weights stay in registers.
#include <ptx/mma.cuh>

constexpr int rows = 16;
constexpr int d = 16;     // columns of Q, K, V and O
constexpr int keys = 16;  // keys per tile: two 16 x 8 results, or the depth (k) of one mma.sync

// Packs two adjacent results D [16][8] of the first product into operand A [16][16] of the second.
// left holds the weights of keys 0 … 7 of the tile, right the weights of keys 8 … 15.
__device__ void make_operand(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
  // hole
  a[0] = pack<__half>(left[0], left[1]);
  a[1] = pack<__half>(left[2], left[3]);
  a[2] = pack<__half>(right[0], right[1]);
  a[3] = pack<__half>(right[2], right[3]);
  // end
}

// Copies 16 rows of X from row `first` on.
__device__ void load_tile(__half (&tile)[16][d], const __half* X, int first) {
  for (int i = threadIdx.x; i < 16 * d; i += 32) tile[i / d][i % d] = X[first * d + i];
}

// Q, O [16, 16], K, V [N, 16]; N is a multiple of 16.
extern "C" __global__ void probabilities_as_operand(const __half* Q, const __half* K,
                                                    const __half* V, float* O, int N) {
  __shared__ __align__(16) __half Q_tile[rows][d], K_tile[keys][d], V_tile[keys][d];
  const int lane = threadIdx.x;
  load_tile(Q_tile, Q, 0);
  float O_left[4] = {}, O_right[4] = {};
  for (int first = 0; first < N; first += keys) {
    load_tile(K_tile, K, first);
    load_tile(V_tile, V, first);
    __syncwarp();
    unsigned a[4], b[4];
    ldmatrix(a, &Q_tile[lane % 16][lane / 16 * 8]);
    ldmatrix(b, &K_tile[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    float left[4] = {}, right[4] = {};
    multiply_add<__half>(left, a, b[0], b[1]);
    multiply_add<__half>(right, a, b[2], b[3]);
    for (int i = 0; i < 4; ++i) {
      left[i] = expf(left[i]);
      right[i] = expf(right[i]);
    }
    make_operand(a, left, right);
    ldmatrix_trans(b, &V_tile[lane % 16][lane / 16 * 8]);
    multiply_add<__half>(O_left, a, b[0], b[1]);
    multiply_add<__half>(O_right, a, b[2], b[3]);
    __syncwarp();
  }
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    O[row * d + column] = O_left[i];
    O[row * d + column + 8] = O_right[i];
  }
}
