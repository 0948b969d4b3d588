__shared__ int count;
if (threadIdx.x == 0) count = 0;
__syncthreads();
atomicAdd(&count, 1);
A[threadIdx.x] = 0;
