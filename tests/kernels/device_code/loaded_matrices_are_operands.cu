__shared__ __align__(16) unsigned short tiles[32][24];
int lane = threadIdx.x, r = lane / 4, c = 2 * (lane % 4);
for (int i = 0; i < 16; ++i) tiles[lane][i] = A[lane * 16 + i];
__syncthreads();
unsigned a[4], b[4];
ldmatrix(a, &tiles[lane % 16][lane / 16 * 8]);
ldmatrix${load}(b, &tiles[16 + ${rows}][${column}]);
for (int turn = 0; turn < 2; ++turn) {
  float d[2][4] = {};
  for (int half = 0; half < 2; ++half) {
    multiply_add<${c_type}>(d[half], a, b[2 * half], b[2 * half + 1]);
    for (int i = 0; i < 4; ++i) {
      B[turn * 256 + (r + i / 2 * 8) * 16 + half * 8 + c + i % 2] = d[half][i];
    }
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = pack<${c_type}>(d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]);
  }
}
