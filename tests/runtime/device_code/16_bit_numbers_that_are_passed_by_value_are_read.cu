__shared__ ${number} all[64];
all[threadIdx.x] = ${number}(float(threadIdx.x));
__syncthreads();
A[threadIdx.x] = twice(all[63 - threadIdx.x]);
