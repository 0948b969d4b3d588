__shared__ __align__(16) unsigned short tile[64][8];
for (int i = 0; i < 8; ++i) tile[threadIdx.x][i] = i;
__syncwarp();
unsigned r[4];
ldmatrix(r, {row});
