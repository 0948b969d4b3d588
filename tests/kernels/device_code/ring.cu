    Shared& shared = shared_memory<Shared>();
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) init_barrier(shared.full[i], 1);
      for (int i = 0; i < 2; ++i) init_barrier(shared.empty[i], 4);
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {  // producer warpgroup
      decrease_registers<24>();
      if (threadIdx.x < 160 && elect_one()) {
        for (int i = 0; i < 5; ++i) {
          wait(shared.empty[i % 2], (i / 2 + 1) % 2);
          arrive_expect_tx(shared.full[i % 2], bytes);
          tma_load(&shared.A[i % 2], a, shared.full[i % 2], i * 64, 0, blockIdx.x, 0);
          tma_load(&shared.B[i % 2], b, shared.full[i % 2], i * 64, 0, blockIdx.x, 0);
        }
      }
      return;
    }
    increase_registers<240>();
    float d[16];
    for (int i = 0; i < 5; ++i) {
      wait(shared.full[i % 2], i / 2 % 2);
      wgmma_fence();
      for (int k = 0; k < 4; ++k) {
        multiply<__half>(d, by_rows(&shared.A[i % 2]) + k * 32, by_rows(&shared.B[i % 2]) + k * 32,
                         i + k > 0);
      }
      wgmma_commit_group();
      wgmma_wait_group<0>(d);
      if (elect_one()) arrive(shared.empty[i % 2]);
    }
    c += blockIdx.x * 64 * 32;
