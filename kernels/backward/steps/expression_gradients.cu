// expression_gradients: computes gradients of arrays that expressions read, such as a bias or
// slopes.
//
// A score x = expression(scale * q·k, a[i], …) depends on every element that the expression reads.
// With P = exp(x - lse) and D = rowsum(dO * O) - dlse, the gradient of x is P * (dP - D). The
// gradient of a[i] is the sum of P * (dP - D) * dx/da[i] over all pairs that read a[i].
//
// The kernel runs twice: first to find the largest term of each element, then to add all terms. A
// term is a sum over keys of a row that read the same element: over the whole row, or over a lane's
// consecutive keys. Both runs use the same machine code, so that their terms are identical.
//
//   Q, O, dO [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse [batch, heads, M]
//   grid (cdiv(M, warps) * heads * batch)    block (threads), a warp for each row
//   the host sets: scalar, result, real, d, dv, threads, shared_bytes, has_dlse, words,
//   options and the tape of the expressions
#include <attention/score.cuh>
#include <attention/weight.cuh>
#include <backward/parts/exact_sums.cuh>
#include <backward/parts/gradient_of_lse.cuh>
#include <ptx/opaque.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void expression_gradients(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const result> O,
    Tensor<const scalar> dO, Tensor<const real> lse, int* exponents, long long* sums,
    unsigned* flags, int bits, int finds_largest, Sizes sizes, int heads, int group, real scale,
    Mods mods, Gradients gradients) {
  constexpr int rows = threads / warp_size;
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(sizes.M, rows), heads);
  const int row = tile * rows + threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const Extent extent = extent_of(sizes, mods, batch, head);
  if (row >= extent.M) return;
  const real sum = *lse.row(batch, head, row);
  if (sum == -infinity) return;

  const scalar *query = Q.row(batch, head, row), *gradient = dO.row(batch, head, row);
  const result* output = O.row(batch, head, row);
  real delta = 0;
  for (int col = lane; col < dv; col += warp_size) delta += real(output[col]) * real(gradient[col]);
  delta = warp_sum(delta) - gradient_of_lse(mods, batch, head, row);

  const ExactSums exact = {exponents, sums, flags, bits};
  const auto take = [&](long long element, double term) {
    if (opaque(finds_largest))
      exact.note(element, term);
    else
      exact.add(element, term);
  };
  Run runs[accesses];
  for (int key = extent.kv_begin(row) + lane; key < extent.kv_end(row); key += warp_size) {
    if (!extent.shown(row, key)) continue;
    const scalar* of_key = K.row(batch, head / group, key);
    const scalar* value = V.row(batch, head / group, key);
    real product = 0, dP = 0;
    for (int i = 0; i < d; ++i) product += real(query[i]) * real(of_key[i]);
    for (int i = 0; i < dv; ++i) dP += real(gradient[i]) * real(value[i]);

    Slopes tape;
    const Slopes::Number x = score_mod(Slopes::Number(product * scale), tape, mods, batch, head,
                                       Index(row), Index(key), extent.M, extent.N);
    const real p = weight_of(x.value, sum);
    if (p == 0) continue;  // the slope may be infinite
    const real dx = p * (extent.dropped(dP, row, key) - delta);
#pragma unroll
    for (int i = 0; i < accesses; ++i)
      runs[i].add(starts[array_of[i]] + tape.place[i], dx * x.slope[1 + i], take);
  }
#pragma unroll
  for (int i = 0; i < accesses; ++i) runs[i].end(lane, take);
}
