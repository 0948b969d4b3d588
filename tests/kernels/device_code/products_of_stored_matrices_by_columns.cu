Shared& shared = shared_memory<Shared>();
fill(&shared.B, b, 64 * ${wide});
int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
for (int k = 0; k < 4; ++k) {
  unsigned registers[4];
  for (int i = 0; i < 4; ++i) {
    // Registers hold this warp's rows of the transpose of A.
    int row = warp * 16 + lane / 4 + i % 2 * 8, column = k * 16 + lane % 4 * 2 + i / 2 * 8;
    ${c_type} pair[2] = {a[column * 64 + row], a[(column + 1) * 64 + row]};
    registers[i] = *reinterpret_cast<unsigned*>(pair);
  }
  store_matrices_transposed(
      shared.A.at(k * 16 + lane % 8 + lane / 16 * 8, warp * 2 + lane / 8 % 2), registers);
}
fence_proxy_async();
__syncthreads();
float d[${n} / 2];
wgmma_fence();
for (int k = 0; k < 4; ++k) {
  multiply_columns<${c_type}>(d, by_rows(shared.A.box) + k * 32,
                             by_columns(shared.B.box, 64) + k * 2048, k > 0);
}
wgmma_commit_group();
wgmma_wait_group<0>(d);
${write}
