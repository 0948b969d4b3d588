int lane = threadIdx.x;
double a[8], b[4], d[4];
for (int i = 0; i < 8; ++i) a[i] = A[i * 32 + lane];
for (int i = 0; i < 4; ++i) b[i] = B[i * 32 + lane];
for (int i = 0; i < 4; ++i) d[i] = C[i * 32 + lane];
multiply_add_f64(d, a, b);
for (int i = 0; i < 4; ++i) C[i * 32 + lane] = d[i];
