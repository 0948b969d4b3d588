// lse of 64 rows of scores S = Q Kᵀ, computed with wgmma by a warpgroup of four warps.
#include <ptx/bulk_store.cuh>
#include <ptx/wgmma.cuh>

constexpr int rows = 64;         // rows of a wgmma result
constexpr int keys = 32;         // columns of the result
constexpr int d = 64;            // columns of Q and K: rows of 128 bytes in shared memory
constexpr int count = keys / 2;  // scores per lane
constexpr int threads = 128;     // a warpgroup
constexpr unsigned all_lanes = 0xffffffff;

// Computes the lse of each row from the scores in the lanes' registers, and writes it to `lse`.
__device__ void store_lse(float* lse, const float (&S)[count]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int half = 0; half < 2; ++half) {  // each lane holds scores of two rows
    int row = 0;
    float largest = -1e30f, sum = 0.0f;
    // hole
    row = 16 * warp + lane / 4 + 8 * half;
    for (int i = 2 * half; i < count; i += 4) {
      largest = fmaxf(largest, fmaxf(S[i], S[i + 1]));
    }
    for (int mask = 1; mask <= 2; mask *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, mask));
    }
    for (int i = 2 * half; i < count; i += 4) {
      sum += expf(S[i] - largest) + expf(S[i + 1] - largest);
    }
    for (int mask = 1; mask <= 2; mask *= 2) sum += __shfl_xor_sync(all_lanes, sum, mask);
    // end
    if (lane % 4 == 0) lse[row] = largest + logf(sum);
  }
}

// Copies X [size, 64] to shared memory, with the swizzle that wgmma expects.
template <int size>
__device__ void load_tile(__half (&tile)[size][d], const __half* X) {
  for (int i = threadIdx.x; i < size * d / 8; i += threads) {
    const int row = i / 8, chunk = i % 8;
    reinterpret_cast<uint4&>(tile[row][(chunk ^ (row % 8)) * 8]) =
        reinterpret_cast<const uint4*>(X)[i];
  }
}

// Q [64, 64], K [32, 64], lse [64]
extern "C" __global__ void wgmma_rows(const __half* Q, const __half* K, float* lse) {
  __shared__ __align__(1024) __half Q_tile[rows][d], K_tile[keys][d];
  load_tile(Q_tile, Q);
  load_tile(K_tile, K);
  fence_proxy_async();
  __syncthreads();
  float S[count] = {};
  wgmma_fence();
  for (int step = 0; step < d / 16; ++step) {
    multiply<__half>(S, by_rows(Q_tile) + step * wgmma_bytes, by_rows(K_tile) + step * wgmma_bytes,
                     step > 0);
  }
  wgmma_commit_group();
  wgmma_wait_group<0>(S);
  store_lse(lse, S);
}
