int local[8192];
for (int i = 0; i < 8192; ++i) local[i] = i + threadIdx.x;
__syncthreads();
int sum = 0;
for (int i = 0; i < 8192; ++i) sum += local[(i * 7) % 8192];
A[threadIdx.x] = sum;
