// mine: one thread per query row, which iterates over all keys with an online softmax.
#include <tile/math.cuh>
#include <tile/tensor.cuh>

extern "C" __global__ void mine(Tensor<const scalar> Q, Tensor<const scalar> K,
                                Tensor<const scalar> V, Tensor<scalar> O, int M, int N,
                                real scale) {
  const int row = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, batch = blockIdx.z;
  if (row >= M) return;
  real maximum = -infinity, sum = 0, out[dv] = {};
  for (int key = 0; key < N; ++key) {
    real score = 0;
    for (int i = 0; i < d; ++i)
      score += real(Q.row(batch, head, row)[i]) * real(K.row(batch, head, key)[i]);
    score *= scale;
    const real higher = fmax(maximum, score);
    const real factor = exp(maximum - higher), weight = exp(score - higher);
    for (int i = 0; i < dv; ++i)
      out[i] = out[i] * factor + weight * real(V.row(batch, head, key)[i]);
    sum = sum * factor + weight;
    maximum = higher;
  }
  for (int i = 0; i < dv; ++i) O.row(batch, head, row)[i] = scalar(out[i] / sum);
}
