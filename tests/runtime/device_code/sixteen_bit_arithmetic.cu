int i = threadIdx.x;
C[i] = A[i] + B[i];
C[512 + i] = A[i] - B[i];
C[1024 + i] = A[i] * B[i];
C[1536 + i] = A[i] / B[i];
C[2048 + i] = A[i] < B[i] ? -A[i] : B[i];
