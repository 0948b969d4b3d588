// merge_parts: merges attention over parts of the keys into attention over all keys.
//
// With m the largest lse of a row's parts and w_i = exp(lse_i - m), the merged row is the sum of
// w_i / sum(w) * out_i, and its lse is m + log(sum(w)). Each column is summed by one thread in the
// order of the parts, so every run returns the same bits. Weights are normalized before they
// multiply outputs: no sum is larger than the largest output. (Dao et al., 2023, Flash-Decoding)
//
// If there are more parts than `room`, several launches pass on their sums (`sums`, `totals`).
//
//   O [batch, heads, M, dv]    lse [batch, heads, M]    parts: `count` pairs of these shapes
//   sums [rows, dv], totals [rows, lanes]: state between launches, if `carries`
//   grid (cdiv(rows, threads / lanes)), rows = batch * heads * M    block (threads), `lanes` a row
//   the host sets: scalar, real, room, vector, lanes, threads, carries
#include <merge/parts.cuh>

// The largest lse of the parts so far, and the sum of exp(lse - maximum).
struct Total {
  real maximum, sum;
};

extern "C" __global__ __launch_bounds__(threads) void merge_parts(
    Tensor<scalar> O, Tensor<real> lse, real* sums, Total* totals, int M, int heads, long long rows,
    int dv, int count, int follows, int is_last,
    const __grid_constant__ Parts<const scalar, const real> parts) {
  const unsigned long long number = row_of_thread();
  if (number >= rows) return;
  const Row row = row_numbered(number, M, heads);
  const int lane = threadIdx.x % lanes;

  Total before = {-infinity, 0};
  if constexpr (carries)
    if (follows) before = totals[number * lanes + lane];
  Total total = before;
  for (int i = 0; i < count; ++i) total.maximum = fmax(total.maximum, *at(parts.part[i].lse, row));
  const real kept =
      before.sum == 0 ? real(0) : before.sum * weight_of(before.maximum, total.maximum);
  total.sum = kept;
  for (int i = 0; i < count; ++i)
    total.sum += weight_of(*at(parts.part[i].lse, row), total.maximum);
  const real inverse = total.sum == 0 ? real(0) : 1 / total.sum;

  for (int col = lane * width; col < dv; col += lanes * width) {
    const auto sum_of = [&](int j) -> real& { return sums[number * dv + col + j]; };
    real o[width] = {};
    if constexpr (carries)
      if (follows)
        for (int j = 0; j < min(width, dv - col); ++j) o[j] = kept * inverse * sum_of(j);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      Columns part;
      part.load(at(parts.part[i].out, row), col, dv);
      const real part_lse = *at(parts.part[i].lse, row);
      const real weight = weight_of(part_lse, total.maximum) * inverse;
      if (!adds_nothing(part_lse))
#pragma unroll
        for (int j = 0; j < width; ++j) o[j] = fma(weight, real(part[j]), o[j]);
    }
    if (!carries || is_last) {
      Columns made;
#pragma unroll
      for (int j = 0; j < width; ++j) made[j] = scalar(o[j]);
      made.store(at(O, row), col, dv);
    } else {
      for (int j = 0; j < min(width, dv - col); ++j) sum_of(j) = o[j];
    }
  }
  if (carries && !is_last)
    totals[number * lanes + lane] = total;
  else if (lane == 0)
    *at(lse, row) = total.sum == 0 ? real(-infinity) : total.maximum + log(total.sum);
}
