Shared& shared = shared_memory<Shared>();
fill(&shared, b, 32 * ${wide});
fence_proxy_async();
__syncthreads();
float d[${n} / 2];
wgmma_fence();
for (int k = 0; k < 2; ++k) {
  unsigned registers[4];
  for (int i = 0; i < 4; ++i) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
    int column = k * 16 + threadIdx.x % 4 * 2 + i / 2 * 8;
    registers[i] = *reinterpret_cast<const unsigned*>(a + row * 32 + column);
  }
  multiply<${c_type}>(d, registers, by_columns(&shared, 32) + k * 2048, k > 0);
}
wgmma_commit_group();
wgmma_wait_group<0>(d);
${write}
