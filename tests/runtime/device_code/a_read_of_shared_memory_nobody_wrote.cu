${declare}
shared.x[threadIdx.x] = 1;
__syncthreads();
const float x = shared.x[threadIdx.x + s0];
if (blockIdx.x == 0) A[threadIdx.x] = x;
