// softmax_online: maximum and sum in one pass over the row, then divide.
//
// Each thread keeps a running maximum and a running sum of exponentials, and rescales the sum when
// the maximum grows. The results of all threads are merged in the same way. The row is read twice
// instead of three times.
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

extern "C" __global__ __launch_bounds__(threads) void softmax_online(Tensor<const scalar> S,
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
  for (int col = kv_begin + threadIdx.x; col < kv_end; col += threads) {
    const real score = scorer(real(scores[col]));
    softmax.raise(score);
    softmax.sum += softmax.p(score);
  }
  timeline::end(timeline::softmax);
  softmax.raise(block_max(softmax.maximum, shared.partial));
  softmax.sum = block_sum(softmax.sum, shared.partial);

  const timeline::Phase phase(timeline::epilogue);
  for (int col = threadIdx.x; col < extent.N; col += threads) {
    out[col] = extent.sees(row, col)
                   ? scalar(softmax.p(scorer(real(scores[col]))) * softmax.inverse_sum())
                   : scalar(real(0));
  }
  if (threadIdx.x == 0) *lse.row(batch, head, row) = softmax.lse();
}
