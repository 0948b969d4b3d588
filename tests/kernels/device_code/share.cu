cp_async(tile[me], A + me * 8, 16);
cp_async_commit_group();
cp_async_wait_group<0>();
__syncthreads();
B[me] = tile[me ^ s0][0];
