// sloped: attention with capped scores that fall with the distance between query and key.
#include <attention/extent.cuh>
#include <attention/online_softmax.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

extern "C" __global__ void sloped(Tensor<const scalar> Q, Tensor<const scalar> K,
                                  Tensor<const scalar> V, Tensor<const real> slopes,
                                  const bool* is_shown, Tensor<scalar> O, Tensor<real> lse,
                                  Tensor<real> top, Sizes sizes, int heads, int group, real scale,
                                  real cap) {
  const int row = blockIdx.x * threads + threadIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const Extent extent = extent_of(sizes, batch);
  if (row >= extent.M) return;
  const real slope = *slopes.row(batch, head, 0);
  OnlineSoftmax softmax;
  real sums[dv] = {}, highest = -infinity;
  for (int key = extent.kv_begin(row); key < extent.kv_end(row); ++key) {
    if (!is_shown[batch * extent.N + key]) continue;
    real product = 0;
    for (int i = 0; i < d; ++i)
      product += real(Q.row(batch, head, row)[i]) * real(K.row(batch, head / group, key)[i]);
    real score = product * scale - slope * real(row > key ? row - key : key - row);
    score = cap * tanh(score / cap);
    highest = fmax(highest, score);
    const real factor = softmax.raise(score), weight = softmax.p(score);
    softmax.sum += weight;
    for (int i = 0; i < dv; ++i)
      sums[i] = sums[i] * factor + weight * real(V.row(batch, head / group, key)[i]);
  }
  for (int i = 0; i < dv; ++i) O.row(batch, head, row)[i] = scalar(sums[i] * softmax.inverse_sum());
  *lse.row(batch, head, row) = softmax.lse();
  *top.row(batch, head, row) = highest;
}
