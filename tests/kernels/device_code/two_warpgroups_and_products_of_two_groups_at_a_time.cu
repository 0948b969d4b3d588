Shared& shared = shared_memory<Shared>();
fill(&shared.A, a, 64 * 128);
fill(&shared.B, b, 64 * 128);
fence_proxy_async();
__syncthreads();
float d[32], other[32];
wgmma_fence();
for (int k = 0; k < 8; ++k) {
  multiply<__half>(d, by_rows(shared.A.box[k / 4]) + k % 4 * 32,
                   by_rows(shared.B.box[k / 4]) + k % 4 * 32, k > 0);
}
wgmma_commit_group();
multiply<__half>(other, by_rows(&shared.B), by_rows(&shared.A), false);
wgmma_commit_group();
wgmma_wait_group<1>(d);
for (int j = 0; j < 32; ++j) d[j] *= 2;
wgmma_fence();
multiply<__half>(d, by_rows(&shared.A), by_rows(&shared.B), true);
wgmma_commit_group();
wgmma_wait_group<1>(other);
for (int j = 0; j < 32; ++j) other[j] = -other[j];
wgmma_wait_group<0>(d);
if (threadIdx.x >= 128) for (int j = 0; j < 32; ++j) d[j] = other[j];
int group = threadIdx.x / 128, thread = threadIdx.x % 128;
for (int j = 0; j < 32; ++j) {
  int row = thread / 32 * 16 + thread % 32 / 4 + j / 2 % 2 * 8;
  c[group * 4096 + row * 64 + j / 4 * 8 + thread % 4 * 2 + j % 2] = d[j];
}
