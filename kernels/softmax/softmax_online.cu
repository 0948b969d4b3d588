// softmax_online: maximum and sum in one pass over the row, then divide.
//
// Each thread carries the maximum and the sum of what it has seen, and rescales the sum when the
// maximum grows; the threads' pairs are merged the same way. The row is read twice, not three
// times.
//
//   S, P [batch, heads, M, N]    lse [batch, heads, M]
//   grid (M * heads * batch)    block (threads)
//   the host sets: scalar, real, causal, windowed, threads, shared_bytes
#include <tile/block.cuh>
#include <attention/mask.cuh>
#include <tile/shared.cuh>
#include <attention/online_softmax.cuh>
#include <tile/tensor.cuh>

struct Shared {
  real partial[warps];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

extern "C" __global__ __launch_bounds__(threads) void softmax_online(Tensor<const scalar> S,
                                                                     Tensor<scalar> P,
                                                                     Tensor<real> lse, int M, int N,
                                                                     int heads, int causal_offset,
                                                                     int window_offset) {
  Shared& shared = shared_memory<Shared>();
  const auto [row, head, batch] = place(blockIdx.x, M, heads);
  const scalar* scores = S.row(batch, head, row);
  scalar* weights = P.row(batch, head, row);
  const int visible = kv_end(row, N, causal_offset), hidden = kv_begin(row, N, window_offset);

  OnlineSoftmax softmax;
  for (int col = hidden + threadIdx.x; col < visible; col += threads) {
    const real score = real(scores[col]);
    softmax.raise(score);
    softmax.sum += softmax.weight(score);
  }
  softmax.raise(block_max(softmax.maximum, shared.partial));
  softmax.sum = block_sum(softmax.sum, shared.partial);

  for (int col = threadIdx.x; col < N; col += threads) {
    weights[col] = sees_key(row, col, N, causal_offset, window_offset)
                       ? scalar(softmax.weight(real(scores[col])) * softmax.inverse_sum())
                       : scalar(real(0));
  }
  if (threadIdx.x == 0) *lse.row(batch, head, row) = softmax.lse();
}
