// merge_rows: merges the results of all splits of the keys into rows of O (Flash-Decoding).
//
// The sums of a split are relative to its own maximum. They are rescaled to the largest maximum of
// all splits, added in a fixed order, and divided once: an online softmax over splits instead of
// tiles. A split without visible keys has sums of 0 and the lowest maximum, so it contributes
// nothing.
//
//   O_splits [batch, heads, M, num_splits, dv]
//   max_splits, sum_splits [batch, heads, M, num_splits]
//   O [batch, heads, M, dv]    lse [batch, heads, M]
//   grid (M * heads * batch)    block (threads): each thread owns columns
//   the host sets: scalar, result, real, dv, threads and options (extent.cuh)
#include <attention/online_softmax.cuh>
#include <attention/score.cuh>
#include <tile/tensor.cuh>

extern "C" __global__ __launch_bounds__(threads) void merge_rows(
    const real* O_splits, const real* max_splits, const real* sum_splits, Tensor<result> O,
    Tensor<real> lse, int num_splits, Sizes sizes, int heads, Mods mods) {
  const auto [row, head, batch] = place(blockIdx.x, sizes.M, heads);
  if (!extent_of(sizes, mods, batch).has_tile_of_rows(row)) return;  // no split computed this row
  const long long first = (long long)blockIdx.x * num_splits;

  OnlineSoftmax softmax;
  for (int i = 0; i < num_splits; ++i)
    softmax.maximum = fmax(softmax.maximum, max_splits[(first + i) * stored_maxima]);
  for (int i = 0; i < num_splits; ++i)
    softmax.sum += softmax.p(max_splits[(first + i) * stored_maxima]) * sum_splits[first + i];
  const real inverse = softmax.inverse_sum();
  for (int col = threadIdx.x; col < dv; col += threads) {
    real sum = 0;
#pragma unroll 4
    for (int i = 0; i < num_splits; ++i)
      sum += softmax.p(max_splits[(first + i) * stored_maxima]) * O_splits[(first + i) * dv + col];
    O.row(batch, head, row)[col] = result(sum * inverse);
  }
  if (threadIdx.x == 0) *lse.row(batch, head, row) = softmax.lse();
  if constexpr (has_row_max) {
    if (threadIdx.x > 0) return;
    for (int i = 0; i < num_splits; ++i)
      softmax.raise_row_max(0, max_splits[(first + i) * stored_maxima + 1]);
    write_row_max(extent_of(sizes, mods, batch, head), row, softmax.row_max(0), softmax.sum);
  }
}
