unsigned r[4];
for (int i = 0; i < 4; ++i) {
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
  int column = 32 * k + threadIdx.x % 4 * 4 + i / 2 * 16;
  const E4m3* at = shared.A.at(row, column / 16) + column % 16;
  r[i] = at[0].bits | at[1].bits << 8 | at[2].bits << 16 | at[3].bits << 24;
}
wgmma_fence();
multiply<E4m3>(d, r, by_rows(shared.B.box[0]) + 32 * k, k > 0);
