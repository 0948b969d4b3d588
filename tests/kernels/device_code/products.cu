Shared& shared = shared_memory<Shared>();
fill(&shared.A, a, 64 * 64);
fill(&shared.B, b, 32 * 64);
fence_proxy_async();
__syncthreads();
float d[16];
wgmma_fence();
for (int k = 0; k < 4; ++k) { ${product} }
wgmma_commit_group();
wgmma_wait_group<0>(d);
