Shared& shared = shared_memory<Shared>();
fill(&shared.A, a, 64 * 64);
fill(&shared.B, b, 64 * 64);
fence_proxy_async();
__syncthreads();
float d[32];
wgmma_fence();
for (int k = 0; k < 4; ++k) {
  multiply<__half>(d, by_rows(shared.A.box[0]) + k * 32, by_rows(shared.B.box[0]) + k * 32,
                   k > 0);
}
wgmma_commit_group();
wgmma_wait_group<0>(d);
${write}
