struct Shared { float x[32]; };
Shared& shared = shared_memory<Shared>();
shared.x[threadIdx.x] = blockIdx.x;
__syncthreads();
A[blockIdx.x * 32 + threadIdx.x] = shared.x[31 - threadIdx.x];
