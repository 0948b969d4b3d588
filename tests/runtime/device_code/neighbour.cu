__shared__ float x[64];
x[threadIdx.x] = A[threadIdx.x];
__syncthreads();
A[threadIdx.x] = x[63 - threadIdx.x];
