__shared__ __align__(16) unsigned short tile[3][20][32][8];
int me = threadIdx.x;
for (int stage = 0; stage < 5; ++stage) {
  if (stage < 3) {
    for (int i = 0; i < 20; ++i) {
      cp_async(tile[stage][i][me], A + ((stage * 20 + i) * 32 + me) * 8, 16);
    }
  }
  cp_async_commit_group();
  cp_async_wait_group<2>();
  __syncthreads();
  if (stage < 2) continue;
  for (int i = 0; i < 20; ++i) {
    for (int j = 0; j < 8; ++j) {
      B[(((stage - 2) * 20 + i) * 32 + me) * 8 + j] = tile[stage - 2][i][31 - me][j];
    }
  }
}
