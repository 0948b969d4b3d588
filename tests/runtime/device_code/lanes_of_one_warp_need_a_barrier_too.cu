__shared__ int x[32];
x[threadIdx.x] = threadIdx.x;
__syncwarp();
A[threadIdx.x] = x[31 - threadIdx.x];
__syncwarp();
x[threadIdx.x] = 0;
