__shared__ unsigned char x[32];
x[threadIdx.x] = threadIdx.x;
__syncthreads();
A[threadIdx.x] = x[threadIdx.x ^ 1];
