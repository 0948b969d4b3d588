// Copies a tile of rows of x [M, d] to shared memory. The judge counts the sectors that are read.

constexpr int Br = 16, d = 40, threads = 64;
constexpr int stride = d + 1;  // row stride in shared memory: padded by one column

// Loads elements of x and records their indices in reads [loads, threads]; -1 means no load.
struct Loader {
  const float* x;
  int* reads;
  int loads;

  __device__ float operator()(int index) {
    reads[loads++ * threads + threadIdx.x] = index;
    return x[index];
  }
};

// Copies rows first_row … first_row + Br - 1 of x to `tile`; rows past the end become zeros.
__device__ void copy_tile(Loader load, int first_row, int M, float* tile) {
  // hole
  for (int i = threadIdx.x; i < Br * d; i += threads) {
    const int row = i / d, col = i % d;
    const bool exists = first_row + row < M;
    tile[row * stride + col] = exists ? load((first_row + row) * d + col) : 0.0f;
  }
  // end
}

// tiles [blocks, Br, d]: the tiles in shared memory. sectors [blocks]: number of 32-byte sectors,
// summed over the loads of the warps. reads [blocks, Br * d, threads].
extern "C" __global__ void coalesced_tile(const float* x, float* tiles, int* sectors, int* reads,
                                          int M) {
  __shared__ float tile[Br * stride];
  reads += blockIdx.x * Br * d * threads;
  for (int i = threadIdx.x; i < Br * stride; i += threads) tile[i] = -1;  // marks missing writes
  __syncthreads();
  copy_tile(Loader{x, reads, 0}, blockIdx.x * Br, M, tile);
  __syncthreads();

  for (int i = threadIdx.x; i < Br * d; i += threads) {
    tiles[blockIdx.x * Br * d + i] = tile[i / d * stride + i % d];
  }
  const bool is_first_lane = threadIdx.x % 32 == 0;
  int found = 0;
  for (int load = 0; load < Br * d; ++load) {
    const int* read = &reads[load * threads + threadIdx.x];
    if (*read >= 0 && (is_first_lane || read[-1] < 0 || read[-1] / 8 != *read / 8)) ++found;
  }
  atomicAdd(&sectors[blockIdx.x], found);
}
