int lane = threadIdx.x;
const unsigned a[4] = {A[lane], A[32 + lane], A[64 + lane], A[96 + lane]};
float d[4];
for (int i = 0; i < 4; ++i) d[i] = C[i * 32 + lane];
multiply_add<${c_type}>(d, a, B[lane], B[32 + lane]);
for (int i = 0; i < 4; ++i) C[i * 32 + lane] = d[i];
