// score_gradients: computes P from the scores and lse, and dS from P and dP, element by element.
//
// S and dP = dO V^T are full matrices in global memory. P = exp(S - lse) and dS = P * (dP - delta)
// are rounded and written as operands of the products that follow. One launch writes both, because
// dS needs P before rounding. Both are 0 for pairs that a mask hides and for rows that see no key,
// whatever the scores are.
//
//   S, dP, P, dS [batch, heads, M, N]    lse, delta [batch, heads, M]
//   grid (M * heads * batch)    block (threads)
//   the host sets: scalar, real, threads, shared_bytes and options (extent.cuh)
#include <attention/score.cuh>
#include <attention/dropped_weights.cuh>
#include <attention/weight.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void score_gradients(
    Tensor<const real> S, Tensor<const real> dP, Tensor<const real> lse, Tensor<const real> delta,
    Tensor<scalar> P, Tensor<scalar> dS, Sizes sizes, int heads, Mods mods) {
  const auto [row, head, batch] = place(blockIdx.x, sizes.M, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  const Scorer<real> scorer = {1, mods};  // S is already scaled
  const real *row_S = S.row(batch, head, row), *row_dP = dP.row(batch, head, row);
  scalar *row_P = P.row(batch, head, row), *row_dS = dS.row(batch, head, row);
  const real row_lse = *lse.row(batch, head, row), row_delta = *delta.row(batch, head, row);

  const timeline::Phase phase(timeline::softmax, cdiv(extent.N, threads));
  for (int col = threadIdx.x; col < extent.N; col += threads) {
    const bool counts = row_lse != -infinity && extent.sees(row, col);
    const auto [score, slope] = scorer.with_slope(row_S[col], extent, row, col);
    const real p = counts ? weight_of(score, row_lse) : real(0);
    const real kept_dP = extent.dropped(row_dP[col], row, col);
    row_P[col] = scalar(extent.dropped(p, row, col));
    row_dS[col] = scalar(counts ? score_gradient(p, kept_dP - row_delta, slope) : real(0));
  }
}
