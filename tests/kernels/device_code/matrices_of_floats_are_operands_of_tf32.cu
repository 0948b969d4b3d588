__shared__ __align__(16) float tiles[32][8];
int lane = threadIdx.x;
for (int i = 0; i < 8; ++i) tiles[lane][i] = A[lane * 8 + i];
__syncthreads();
unsigned a[4], b[4];
ldmatrix(a, &tiles[lane % 16][lane / 16 * 4]);
ldmatrix(b, &tiles[16 + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 4]);
for (int half = 0; half < 2; ++half) {
  float d[4] = {};
  multiply_add_tf32(d, a, b[2 * half], b[2 * half + 1]);
  for (int i = 0; i < 4; ++i) {
    B[(lane / 4 + i / 2 * 8) * 16 + half * 8 + 2 * (lane % 4) + i % 2] = d[i];
  }
}
