int lane = threadIdx.x;
A[lane] = __shfl_sync(0xffffffffu, lane, 3, 8);
A[32 + lane] = __shfl_up_sync(0xffffffffu, lane, 2, 16);
A[64 + lane] = __shfl_down_sync(0xffffffffu, lane, 5);
A[96 + lane] = __shfl_xor_sync(0xffffffffu, lane, 5, 8);
