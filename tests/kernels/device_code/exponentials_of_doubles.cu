for (int i = threadIdx.x; i < s0; i += 32) B[i] = exp2f(A[i]);
