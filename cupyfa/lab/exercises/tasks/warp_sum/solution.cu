// Scores of one query against the keys of a tile: each warp computes one dot product of 32 columns.

__device__ float sum_of_lanes(float x) {
  // hole
  for (int mask = 16; mask > 0; mask /= 2) {
    x += __shfl_xor_sync(0xffffffff, x, mask);
  }
  return x;
  // end
}

// scores [keys, 32]: every lane writes the score of its warp's key.
extern "C" __global__ void warp_sum(const float* query, const float* keys, float* scores) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  scores[warp * 32 + lane] = sum_of_lanes(query[lane] * keys[warp * 32 + lane]);
}
