// mine: one thread per query row; arrays are bare pointers to contiguous memory.
#include <helper.cuh>

extern "C" __global__ void mine(const scalar* Q, const scalar* K, const scalar* V, scalar* O, int M,
                                int N, int heads, real scale) {
  const long long head = blockIdx.z * heads + blockIdx.y;
  const int row = blockIdx.x * threads + threadIdx.x;
  if (row >= M) return;
  real maximum = -infinity, sum = 0;
  for (int key = 0; key < N; ++key)
    maximum = fmax(maximum, scale * dot(Q + (head * M + row) * d, K + (head * N + key) * d));
  for (int key = 0; key < N; ++key)
    sum += exp(scale * dot(Q + (head * M + row) * d, K + (head * N + key) * d) - maximum);
  for (int col = 0; col < d; ++col) {
    real out = 0;
    for (int key = 0; key < N; ++key) {
      const real score = scale * dot(Q + (head * M + row) * d, K + (head * N + key) * d);
      out += exp(score - maximum) * real(V[(head * N + key) * d + col]);
    }
    O[(head * M + row) * d + col] = scalar(out / sum);
  }
}
