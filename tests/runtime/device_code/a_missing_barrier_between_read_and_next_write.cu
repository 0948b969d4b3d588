__shared__ float x[64];
float sum = 0;
for (int tile = 0; tile < 4; ++tile) {
  x[threadIdx.x] = tile;
  __syncthreads();
  sum += x[63 - threadIdx.x];
  __syncthreads();  // before the next tile overwrites this one
}
A[threadIdx.x] = sum;
