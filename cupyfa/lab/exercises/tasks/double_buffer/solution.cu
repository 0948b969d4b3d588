// O = P V: each warp owns a row, each lane a column. cp.async loads tiles of V into two buffers.
#include <ptx/cp_async.cuh>

constexpr int columns = 32;   // columns of V and O
constexpr int keys = 16;      // keys per tile
constexpr int threads = 128;  // four warps, so four rows
constexpr int in_chunk = 4;   // floats per chunk of 16 bytes
constexpr int chunks = columns / in_chunk;

// Starts copying this thread's 16-byte chunk of a tile, and commits it as a group. Rows of V past
// the end become zeros.
__device__ void copy_tile(float (&tile)[keys][columns], const float* V, int first, int N) {
  const int key = threadIdx.x / chunks, column = threadIdx.x % chunks * in_chunk;
  const bool exists = first + key < N;
  cp_async(&tile[key][column], exists ? &V[(first + key) * columns + column] : V, exists ? 16 : 0);
  cp_async_commit_group();
}

// P [4, N], V [N, 32], O [4, 32]
extern "C" __global__ void double_buffer(const float* P, const float* V, float* O, int N) {
  __shared__ __align__(16) float tiles[2][keys][columns];
  const int row = threadIdx.x / 32, column = threadIdx.x % 32;
  float sum = 0.0f;
  int buffer = 0;
  copy_tile(tiles[buffer], V, 0, N);
  for (int first = 0; first < N; first += keys) {
    // hole
    cp_async_wait_group<0>();
    __syncthreads();
    if (first + keys < N) copy_tile(tiles[1 - buffer], V, first + keys, N);
    // end
    for (int key = 0; key < keys && first + key < N; ++key) {
      sum += P[row * N + first + key] * tiles[buffer][key][column];
    }
    buffer = 1 - buffer;
  }
  O[row * columns + column] = sum;
}
