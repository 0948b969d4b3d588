int i = threadIdx.x + blockIdx.x * blockDim.x;
atomicAdd(&A[0], 1);
atomicMax(&A[1], i);
atomicMin(&A[2], i);
auto old = A[3];
for (;;) {
  auto seen = atomicCAS(&A[3], old, old + 2);
  if (seen == old) break;
  old = seen;
}
