__shared__ int x[32];
int t = threadIdx.x;
x[t] = t;
int y = ${collective};
A[t] = x[t ^ 1] + y;
