B[me] = tile[me ^ 33][0];
__syncthreads();
cp_async(tile[me], A + me * 8, 16);
__syncthreads();
cp_async_commit_group();
cp_async_wait_group<0>();
