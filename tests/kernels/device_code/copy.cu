    Shared& shared = shared_memory<Shared>();
    if (threadIdx.x == 0) {
      init_barrier(shared.full, 1);
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      arrive_expect_tx(shared.full, sizeof shared.tile);
      for (int i = 0; i < 2; ++i)
        tma_load(shared.tile.box[i], a, shared.full, 64 * i - 3, 21, 1, 1);
    }
    wait(shared.full, 0);
    for (int i = threadIdx.x; i < 16 * 16; i += blockDim.x) {
      int row = i / 16, chunk = i % 16;
      unsigned short* at = shared.tile.at(row, chunk);
      for (int j = 0; j < 8; ++j) c[row * 128 + chunk * 8 + j] = at[j]++;
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) tma_store(b, shared.tile.box[i], 64 * i - 3, 21, 1, 1);
      bulk_commit_group();
      bulk_wait_group_read();
    }
