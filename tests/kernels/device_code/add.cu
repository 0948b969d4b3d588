    struct Shared { alignas(16) float numbers[64], more[4]; Barrier full; };
    Shared& shared = shared_memory<Shared>();
    if (threadIdx.x == 0) {
      init_barrier(shared.full, 1);
      fence_barrier_init();
      arrive_expect_tx(shared.full, 256);
      bulk_load(shared.numbers, a + blockIdx.x * 64, 256, shared.full);
    }
    __syncthreads();
    for (int round = 0; round < 3; ++round) {
      if (round == 0) wait(shared.full, 0);
      for (int i = threadIdx.x; i < 64; i += blockDim.x) shared.numbers[i] += 1;
      fence_proxy_async();
      __syncthreads();
      if (threadIdx.x == 0) {
        bulk_add(b, shared.numbers, 64);
        bulk_commit_group();
        bulk_wait_group_read();
      }
      __syncthreads();
    }
