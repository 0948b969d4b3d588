int lane = threadIdx.x;
unsigned quad = 0xfu << (lane & ~3);
int sum = lane;
for (int turn = 0; turn <= lane / 4; ++turn) {
  sum += __shfl_xor_sync(quad, sum, 1);
  sum += __shfl_xor_sync(quad, sum, 2);
}
A[lane] = sum + 1000 * __popc(__ballot_sync(0xffffffffu, lane % 3 == 0));
