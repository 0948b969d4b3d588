__shared__ __align__(16) unsigned short tile[64][8];
int me = threadIdx.x;
for (int i = 0; i < 8; ++i) tile[me][i] = 7;
__syncthreads();
