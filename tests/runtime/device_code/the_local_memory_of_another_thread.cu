__shared__ int* pointer;
int local = threadIdx.x;
if (threadIdx.x == 0) pointer = &local;
__syncthreads();
if (threadIdx.x == 1) A[0] = *pointer;
__syncthreads();
