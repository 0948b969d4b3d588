  real x[200];
#pragma unroll
  for (int i = 0; i < 200; ++i) x[i] = real(Q.data[i * M]);
  for (int round = 0; round < N; ++round) {
#pragma unroll
    for (int i = 0; i < 200; ++i) x[i] = x[i] * x[(i + 7) % 200] + x[(i + 31) % 200];
  }
  real all = 0;
#pragma unroll
  for (int i = 0; i < 200; ++i) all += x[i];
  if (all == real(12345)) O.data[0] = scalar(all);
