// squared_relu: attention without softmax and lse; weights are the squares of positive scores.
//
//   squared_relu, squared_relu_rows: grid (cdiv(M, threads), heads, batch)
//   squared_relu_keys: grid (cdiv(N, threads), kv_heads, batch)
#include <attention/extent.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

struct Inputs {
  Tensor<const scalar> Q, K, V;
  int batch, head, kv_head;
  real scale;

  // Returns the score of a query and a key, or 0 if the score is negative.
  __device__ real positive_score(int row, int key) const {
    real product = 0;
    for (int i = 0; i < d; ++i)
      product += real(Q.row(batch, head, row)[i]) * real(K.row(batch, kv_head, key)[i]);
    return product * scale < 0 ? real(0) : product * scale;  // keeps NaN, unlike fmax
  }

  // Returns the gradient of the weight: the dot product of rows of dO and V.
  __device__ real dP(Tensor<const scalar> dO, int row, int key) const {
    real sum = 0;
    for (int i = 0; i < dv; ++i)
      sum += real(dO.row(batch, head, row)[i]) * real(V.row(batch, kv_head, key)[i]);
    return sum;
  }
};

extern "C" __global__ void squared_relu(Tensor<const scalar> Q, Tensor<const scalar> K,
                                        Tensor<const scalar> V, Tensor<scalar> O, Sizes sizes,
                                        int group, real scale) {
  const int row = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const Extent extent = extent_of(sizes, batch);
  if (row >= extent.M) return;
  const Inputs inputs = {Q, K, V, batch, head, head / group, scale};
  real sums[dv] = {};
  for (int key = extent.kv_begin(row); key < extent.kv_end(row); ++key) {
    const real s = inputs.positive_score(row, key);
    for (int i = 0; i < dv; ++i) sums[i] += s * s * real(V.row(batch, head / group, key)[i]);
  }
  for (int i = 0; i < dv; ++i) O.row(batch, head, row)[i] = scalar(sums[i]);
}

extern "C" __global__ void squared_relu_rows(Tensor<const scalar> Q, Tensor<const scalar> K,
                                             Tensor<const scalar> V, Tensor<const scalar> dO,
                                             Tensor<scalar> dQ, Sizes sizes, int group,
                                             real scale) {
  const int row = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const Extent extent = extent_of(sizes, batch);
  if (row >= extent.M) return;
  const Inputs inputs = {Q, K, V, batch, head, head / group, scale};
  real sums[d] = {};
  for (int key = extent.kv_begin(row); key < extent.kv_end(row); ++key) {
    const real dS = 2 * inputs.positive_score(row, key) * inputs.dP(dO, row, key);
    for (int i = 0; i < d; ++i) sums[i] += dS * real(K.row(batch, head / group, key)[i]);
  }
  for (int i = 0; i < d; ++i) dQ.row(batch, head, row)[i] = scalar(sums[i] * scale);
}

extern "C" __global__ void squared_relu_keys(Tensor<const scalar> Q, Tensor<const scalar> K,
                                             Tensor<const scalar> V, Tensor<const scalar> dO,
                                             Tensor<scalar> dK, Tensor<scalar> dV, Sizes sizes,
                                             int group, real scale) {
  const int key = blockIdx.x * threads + threadIdx.x, kv_head = blockIdx.y, batch = blockIdx.z;
  const Extent extent = extent_of(sizes, batch);
  if (key >= extent.N) return;
  real of_K[d] = {}, of_V[dv] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const Inputs inputs = {Q, K, V, batch, head, kv_head, scale};
    for (int row = 0; row < extent.M; ++row) {
      if (!extent.sees(row, key)) continue;
      const real s = inputs.positive_score(row, key), dS = 2 * s * inputs.dP(dO, row, key);
      for (int i = 0; i < d; ++i) of_K[i] += dS * real(Q.row(batch, head, row)[i]);
      for (int i = 0; i < dv; ++i) of_V[i] += s * s * real(dO.row(batch, head, row)[i]);
    }
  }
  for (int i = 0; i < d; ++i) dK.row(batch, kv_head, key)[i] = scalar(of_K[i] * scale);
  for (int i = 0; i < dv; ++i) dV.row(batch, kv_head, key)[i] = scalar(of_V[i]);
}
