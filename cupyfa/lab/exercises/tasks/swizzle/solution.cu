// One warp loads a tile of 16 rows from shared memory with ldmatrix, without bank conflicts.
#include <ptx/mma.cuh>

constexpr int rows = 16;
constexpr int chunks = 8;    // 16-byte chunks per row: 128 bytes, which span all 32 banks
constexpr int in_chunk = 8;  // 16-bit numbers per chunk
constexpr int columns = chunks * in_chunk;

// Returns where, in its row of shared memory, a chunk is stored.
__device__ int position(int row, int chunk) {
  // hole
  return chunk ^ (row % chunks);
  // end
}

// Returns the address that this lane passes to ldmatrix to load an operand A: 16 rows, and columns
// 16 * step … 16 * step + 15 (two chunks).
__device__ const __half* lane_address(const __half (&tile)[rows][columns], int step) {
  const int lane = threadIdx.x;
  // hole
  const int row = lane % 16;
  const int chunk = 2 * step + lane / 16;
  return &tile[row][position(row, chunk) * in_chunk];
  // end
}

// ldmatrix reads the chunks of eight lanes at a time. Returns the number of these eight lanes,
// including this one, whose chunks lie in the same four banks as this lane's chunk.
__device__ int lanes_in_banks(const __half (&tile)[rows][columns], const __half* address) {
  const int banks = (address - &tile[0][0]) / in_chunk % 8;
  int count = 0;
  for (int i = 0; i < 8; ++i) {
    count += __shfl_sync(0xffffffff, banks, threadIdx.x / 8 * 8 + i) == banks;
  }
  return count;
}

// X [16, 64]. Y [16, 64]: the elements of X that the lanes loaded, at their original positions.
// conflicts [4, 32]: lanes_in_banks for each step and lane.
extern "C" __global__ void swizzle(const __half* X, __half* Y, int* conflicts) {
  __shared__ __align__(128) __half tile[rows][columns];
  const int lane = threadIdx.x;
  for (int i = lane; i < rows * chunks; i += 32) {
    const int row = i / chunks, chunk = i % chunks;
    reinterpret_cast<uint4&>(tile[row][position(row, chunk) * in_chunk]) =
        reinterpret_cast<const uint4*>(X)[i];
  }
  __syncwarp();
  for (int step = 0; step < columns / 16; ++step) {
    const __half* address = lane_address(tile, step);
    conflicts[step * 32 + lane] = lanes_in_banks(tile, address);
    unsigned a[4];
    ldmatrix(a, address);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i % 2 * 8;
      const int column = step * 16 + i / 2 * 8 + lane % 4 * 2;
      reinterpret_cast<unsigned&>(Y[row * columns + column]) = a[i];
    }
  }
}
