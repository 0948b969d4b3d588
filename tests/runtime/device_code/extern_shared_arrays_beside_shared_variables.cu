__shared__ int fixed[3];
extern __shared__ int x[];
fixed[threadIdx.x] = 10 + threadIdx.x;
x[s0 + int(threadIdx.x)] = threadIdx.x;
__syncthreads();
const int sum = fixed[2 - threadIdx.x] + x[2 - threadIdx.x];
if (blockIdx.x == 0) A[threadIdx.x] = sum;
