__shared__ int turn;
if (threadIdx.x == 0) turn = 0;
__syncthreads();
A[blockIdx.x * 64 + atomicAdd(&turn, 1)] = threadIdx.x;
