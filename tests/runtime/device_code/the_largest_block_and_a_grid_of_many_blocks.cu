__shared__ int turn[1024];
turn[threadIdx.x] = threadIdx.x;
__syncthreads();
A[threadIdx.x] = turn[1023 - threadIdx.x];
