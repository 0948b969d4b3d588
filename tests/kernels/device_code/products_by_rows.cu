Shared& shared = shared_memory<Shared>();
fill(&shared.A, a, 64 * 128);
fill(&shared.B, b, ${n} * 128);
fence_proxy_async();
__syncthreads();
float d[${n} / 2];
for (int j = 0; j < ${n} / 2; ++j) {
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + j / 2 % 2 * 8;
  d[j] = c[row * ${n} + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2];
}
wgmma_fence();
for (int k = 0; k < 8; ++k) {
  multiply<${c_type}>(d, by_rows(shared.A.box[k / 4]) + k % 4 * 32,
                     by_rows(shared.B.box[k / 4]) + k % 4 * 32, true);
}
wgmma_commit_group();
wgmma_wait_group<0>(d);
${write}
