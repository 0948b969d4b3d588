// NAME: gradients with damped scores, one thread per row, then one per key.
//
//   Q, O, dO, dQ [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]
//   rows:    grid (cdiv(M, Br) * heads * batch)       block (Br)
//   columns: grid (cdiv(N, Bc) * kv_heads * batch)    block (Bc)
//   the host sets: scalar, real, Br, Bc, d, dv, threads, causal, windowed
#include <attention/extent.cuh>
#include <backward/parts/row_range.cuh>
#include <tile/tensor.cuh>

// Modifies a scaled score, and computes the derivative. Change both functions here and in the file
// of the record, whose reference checks the results. A modification that depends on positions
// needs `row` and `key` as arguments.
__device__ real modified(real score, real limit) {
  return score / (1 + fabs(score) / limit);
}
__device__ real derivative(real score, real limit) {
  const real root = 1 / (1 + fabs(score) / limit);
  return root * root;
}

struct Pair {
  real P, dS;
};

// Computes P and dS of a row and a key; gradients are sums over these. P is recomputed as
// exp(score - lse), since the forward pass does not store it. (Dao et al., 2022, arXiv:2205.14135,
// appendix B.2)
__device__ Pair pair(const scalar* q, const scalar* k, const scalar* v, const scalar* gradient,
                     real lse, real delta, real scale, real limit) {
  real product = 0, dP = 0;
  for (int i = 0; i < d; ++i) product += real(q[i]) * real(k[i]);
  for (int i = 0; i < dv; ++i) dP += real(gradient[i]) * real(v[i]);
  const real score = product * scale;
  const real P = exp(modified(score, limit) - lse);
  return {P, P * (dP - delta) * derivative(score, limit)};
}

// Computes dQ of a row, a sum over the keys visible to it, and delta, which the next launch reads.
// The parameters match `args` in the record, in the same order; change both together.
extern "C" __global__ __launch_bounds__(threads) void NAME_rows(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> O,
    Tensor<const real> lse, Tensor<const scalar> dO, Tensor<real> delta, Tensor<scalar> dQ,
    Sizes sizes, int heads, int group, real scale, real limit) {
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(sizes.M, Br), heads);
  const Extent extent = extent_of(sizes, batch);  // the range of keys visible to each row
  const int row = tile * Br + threadIdx.x, kv_head = head / group;
  if (row >= extent.M) return;  // past the last row; not allowed before __syncthreads()

  const scalar *q = Q.row(batch, head, row), *gradient = dO.row(batch, head, row);
  real mean = 0;  // mean of the row's dP weighted by P, which equals the sum of dO * O
  for (int i = 0; i < dv; ++i) mean += real(gradient[i]) * real(O.row(batch, head, row)[i]);
  *delta.row(batch, head, row) = mean;

  // Sums accumulate in `real`, which is float for 16-bit dtypes, to limit rounding errors. The
  // first optimization would be tiles of K and V in shared memory, shared by the block's rows.
  real sums[d] = {};
  for (int key = extent.kv_begin(row); key < extent.kv_end(row); ++key) {
    const scalar* k = K.row(batch, kv_head, key);
    const auto [P, dS] = pair(q, k, V.row(batch, kv_head, key), gradient,
                              *lse.row(batch, head, row), mean, scale, limit);
    for (int i = 0; i < d; ++i) sums[i] += dS * real(k[i]);
  }
  for (int i = 0; i < d; ++i) dQ.row(batch, head, row)[i] = scalar(sums[i] * scale);
}

// Computes dK and dV of a key: sums over the rows that attend to it, in all heads that share it.
extern "C" __global__ __launch_bounds__(threads) void NAME_columns(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const real> lse,
    Tensor<const scalar> dO, Tensor<const real> delta, Tensor<scalar> dK, Tensor<scalar> dV,
    Sizes sizes, int kv_heads, int group, real scale, real limit) {
  const auto [tile, kv_head, batch] = place(blockIdx.x, max(cdiv(sizes.N, Bc), 1), kv_heads);
  const Extent extent = extent_of(sizes, batch);
  const int key = tile * Bc + threadIdx.x;
  if (key >= extent.N) return;

  const scalar *k = K.row(batch, kv_head, key), *v = V.row(batch, kv_head, key);
  real dK_sums[d] = {}, dV_sums[dv] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int row = row_begin(extent, key); row < row_end(extent, key, 1); ++row) {
      const scalar *q = Q.row(batch, head, row), *gradient = dO.row(batch, head, row);
      const auto [P, dS] = pair(q, k, v, gradient, *lse.row(batch, head, row),
                                *delta.row(batch, head, row), scale, limit);
      for (int i = 0; i < d; ++i) dK_sums[i] += dS * real(q[i]);
      for (int i = 0; i < dv; ++i) dV_sums[i] += P * real(gradient[i]);
    }
  }
  for (int i = 0; i < d; ++i) dK.row(batch, kv_head, key)[i] = scalar(dK_sums[i] * scale);
  for (int i = 0; i < dv; ++i) dV.row(batch, kv_head, key)[i] = scalar(dV_sums[i]);
}
