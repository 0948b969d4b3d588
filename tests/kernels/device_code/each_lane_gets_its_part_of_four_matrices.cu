__shared__ __align__(16) unsigned short tile[32][8];
for (int i = 0; i < 8; ++i) tile[threadIdx.x][i] = A[threadIdx.x * 8 + i];
__syncwarp();
unsigned r[4];
ldmatrix${trans}(r, tile[threadIdx.x ^ 13]);
for (int i = 0; i < 4; ++i) B[i * 32 + threadIdx.x] = r[i];
