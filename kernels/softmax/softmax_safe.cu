// softmax_safe: one block per row, which makes three passes over it.
//
// Subtracting the row's maximum keeps exp from overflowing, but the maximum must be known before
// the first exp, and the sum before the first quotient: maximum, sum, divide. The row is read three
// times.
//
//   S, P [batch, heads, M, N]    lse [batch, heads, M]
//   grid (M * heads * batch)    block (threads)
//   the host sets: scalar, real, threads, shared_bytes and options (extent.cuh)
#include <tile/block.cuh>
#include <attention/score.cuh>
#include <tile/shared.cuh>
#include <attention/online_softmax.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

constexpr int warps = threads / warp_size;
static_assert(threads % warp_size == 0, "shuffles need whole warps");

struct Shared {
  real partial[warps];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

extern "C" __global__ __launch_bounds__(threads) void softmax_safe(Tensor<const scalar> S,
                                                                   Tensor<scalar> P,
                                                                   Tensor<real> lse, Sizes sizes,
                                                                   int heads, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [row, head, batch] = place(blockIdx.x, sizes.M, heads);
  const Extent extent = extent_of(sizes, batch);
  const Scorer<real> scorer = {1, mods};  // the preceding launch has applied the scale
  const scalar* scores = S.row(batch, head, row);
  scalar* out = P.row(batch, head, row);
  const int kv_begin = extent.kv_begin(row), kv_end = extent.kv_end(row);

  timeline::event(timeline::softmax, cdiv(kv_end - kv_begin, threads));
  OnlineSoftmax softmax;
  real largest = -infinity;
  for (int col = kv_begin + threadIdx.x; col < kv_end; col += threads) {
    largest = fmax(largest, scorer(real(scores[col])));
  }
  timeline::end(timeline::softmax);
  softmax.maximum = block_max(largest, shared.partial);

  timeline::event(timeline::softmax, cdiv(kv_end - kv_begin, threads));
  real sum = 0;
  for (int col = kv_begin + threadIdx.x; col < kv_end; col += threads) {
    sum += softmax.p(scorer(real(scores[col])));
  }
  timeline::end(timeline::softmax);
  softmax.sum = block_sum(sum, shared.partial);

  const timeline::Phase phase(timeline::epilogue);
  for (int col = threadIdx.x; col < extent.N; col += threads) {
    out[col] = extent.sees(row, col)
                   ? scalar(softmax.p(scorer(real(scores[col]))) * softmax.inverse_sum())
                   : scalar(real(0));
  }
  if (threadIdx.x == 0) *lse.row(batch, head, row) = softmax.lse();
}
