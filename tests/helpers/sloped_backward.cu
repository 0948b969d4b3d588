// Gradients of attention with scores that fall with the distance between query and key. One thread
// per row of Q, then one per key. P = exp(S - lse) and dS = P * (dO V^T - delta).
#include <attention/extent.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

struct Pair {  // the values for one query and one key
  real P, dS;
};

struct Inputs {
  Tensor<const scalar> Q, K, V, dO;
  Tensor<const real> lse, delta, slopes;
  real scale;

  __device__ Pair at(int batch, int head, int kv_head, int row, int key) const {
    const real total = *lse.row(batch, head, row);
    if (total == -infinity) return {0, 0};
    real product = 0, dP = 0;
    for (int i = 0; i < d; ++i)
      product += real(Q.row(batch, head, row)[i]) * real(K.row(batch, kv_head, key)[i]);
    for (int i = 0; i < dv; ++i)
      dP += real(dO.row(batch, head, row)[i]) * real(V.row(batch, kv_head, key)[i]);
    const real slope = *slopes.row(batch, head, 0);
    const real P = exp(product * scale - slope * real(row > key ? row - key : key - row) - total);
    return {P, P * (dP - *delta.row(batch, head, row))};
  }
};

extern "C" __global__ void sloped_rows(Tensor<const scalar> Q, Tensor<const scalar> K,
                                       Tensor<const scalar> V, Tensor<const scalar> dO,
                                       Tensor<const real> lse, Tensor<const real> delta,
                                       Tensor<const real> slopes, Tensor<scalar> dQ,
                                       Tensor<real> dslope, Sizes sizes, int group, real scale) {
  const int row = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const Extent extent = extent_of(sizes, batch);
  if (row >= extent.M) return;
  const Inputs inputs = {Q, K, V, dO, lse, delta, slopes, scale};
  real sums[d] = {}, of_slope = 0;
  for (int key = extent.kv_begin(row); key < extent.kv_end(row); ++key) {
    const Pair pair = inputs.at(batch, head, head / group, row, key);
    of_slope -= pair.dS * real(row > key ? row - key : key - row);
    for (int i = 0; i < d; ++i) sums[i] += pair.dS * real(K.row(batch, head / group, key)[i]);
  }
  for (int i = 0; i < d; ++i) dQ.row(batch, head, row)[i] = scalar(sums[i] * scale);
  *dslope.row(batch, head, row) = of_slope;
}

extern "C" __global__ void sloped_keys(Tensor<const scalar> Q, Tensor<const scalar> K,
                                       Tensor<const scalar> V, Tensor<const scalar> dO,
                                       Tensor<const real> lse, Tensor<const real> delta,
                                       Tensor<const real> slopes, Tensor<scalar> dK,
                                       Tensor<scalar> dV, Sizes sizes, int group, real scale) {
  const int key = blockIdx.x * threads + threadIdx.x, kv_head = blockIdx.y, batch = blockIdx.z;
  const Extent extent = extent_of(sizes, batch);
  if (key >= extent.N) return;
  const Inputs inputs = {Q, K, V, dO, lse, delta, slopes, scale};
  real of_K[d] = {}, of_V[dv] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int row = 0; row < extent.M; ++row) {
      if (!extent.sees(row, key)) continue;
      const Pair pair = inputs.at(batch, head, kv_head, row, key);
      for (int i = 0; i < d; ++i) of_K[i] += pair.dS * real(Q.row(batch, head, row)[i]);
      for (int i = 0; i < dv; ++i) of_V[i] += pair.P * real(dO.row(batch, head, row)[i]);
    }
  }
  for (int i = 0; i < d; ++i) dK.row(batch, kv_head, key)[i] = scalar(of_K[i] * scale);
  for (int i = 0; i < dv; ++i) dV.row(batch, kv_head, key)[i] = scalar(of_V[i]);
}
