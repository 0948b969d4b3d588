// Two entry points in one file, and shared memory whose size is not in the source.
#include <tile/math.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>

extern "C" __global__ void weigh(Tensor<const scalar> S, Tensor<scalar> P, int M, int N,
                                 int heads) {
  scalar* weights = &shared_memory<scalar>();
  const auto [row, head, batch] = place(blockIdx.x, M, heads);
  for (int i = threadIdx.x; i < N; i += threads) weights[i] = exp(S.row(batch, head, row)[i]);
  __syncthreads();
  for (int i = threadIdx.x; i < N; i += threads) P.row(batch, head, row)[i] = weights[i];
}

extern "C" __global__ void divide(Tensor<scalar> P, int M, int N, int heads) {
  const auto [row, head, batch] = place(blockIdx.x, M, heads);
  scalar* weights = P.row(batch, head, row);
  scalar sum = 0;
  for (int i = 0; i < N; ++i) sum += weights[i];
  for (int i = 0; i < N; ++i) weights[i] /= sum;
}
