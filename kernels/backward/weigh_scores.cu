// weigh_scores: P from the scores and lse, and dS from P and the slopes, element by element.
//
// S and dP = dO V^T lie in memory whole, as sums; P = exp(S - lse) and dS = P * (dP - D) go back
// there, rounded to what the products that follow multiply. Both are written by the same launch,
// since dS takes P before it is rounded. A pair that the mask hides is 0 in both, and so is a row
// that sees no key, whatever its scores are.
//
//   S, dP, P, dS [batch, heads, M, N]    lse, delta [batch, heads, M]
//   grid (M * heads * batch)    block (threads)
//   the host sets: scalar, real, causal, windowed, threads, shared_bytes
#include <attention/mask.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void weigh_scores(
    Tensor<const real> S, Tensor<const real> dP, Tensor<const real> lse, Tensor<const real> delta,
    Tensor<scalar> P, Tensor<scalar> dS, int M, int N, int heads, int causal_offset,
    int window_offset) {
  const auto [row, head, batch] = place(blockIdx.x, M, heads);
  const real *scores = S.row(batch, head, row), *slopes = dP.row(batch, head, row);
  scalar *weights = P.row(batch, head, row), *gradients = dS.row(batch, head, row);
  const real row_lse = *lse.row(batch, head, row), row_delta = *delta.row(batch, head, row);

  for (int col = threadIdx.x; col < N; col += threads) {
    const bool counts = row_lse != -infinity && sees_key(row, col, N, causal_offset, window_offset);
    const real weight = counts ? exp(scores[col] - row_lse) : real(0);
    weights[col] = scalar(weight);
    gradients[col] = scalar(counts ? weight * (slopes[col] - row_delta) : real(0));
  }
}
