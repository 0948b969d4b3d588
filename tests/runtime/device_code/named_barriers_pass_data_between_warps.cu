__shared__ int tile[32];
int lane = threadIdx.x % 32;
for (int turn = 0; turn < 10; ++turn) {
  if (threadIdx.x < 32) {
    barrier_sync(2, 64);  // the tile is free
    tile[lane] = turn * 100 + lane;
    barrier_arrive(1, 64);
  } else {
    barrier_arrive(2, 64);
    barrier_sync(1, 64);  // the tile is full
    A[turn * 32 + lane] = tile[31 - lane];
  }
}
