int lane = threadIdx.x;
unsigned a[4], b[2];
float d[4];
for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(A[i * 32 + lane]);
for (int i = 0; i < 2; ++i) b[i] = __float_as_uint(B[i * 32 + lane]);
for (int i = 0; i < 4; ++i) d[i] = C[i * 32 + lane];
multiply_add_tf32(d, a, b[0], b[1]);
for (int i = 0; i < 4; ++i) C[i * 32 + lane] = d[i];
