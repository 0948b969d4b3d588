__shared__ unsigned count, next;
if (threadIdx.x == 0) count = next = 0;
__syncthreads();
atomicAdd(&count, 1);
atomicInc(&next, 9);
__syncthreads();
if (threadIdx.x == 0) { A[0] = count; A[1] = atomicExch(&next, 5); }
