#pragma once
// The epilogue of a tile of Q: each warp divides the sums by those of P and stores O, lse and their
// derivatives. With n = sum(P S_dot) / sum(P), which is lse_dot,
//
//   O_dot = (sum((P S_dot) V) + sum(P V_dot)) / sum(P) - n * O

#include <attention/nonfinite.cuh>
#include <forward/parts/epilogue.cuh>
#include <tangent/parts/tangent_rows.cuh>

// The inputs and results of one launch. O_dot and lse_dot have batch elements for each direction,
// as the tangents have; the first direction also stores O and lse.
struct Tangents {
  Tensor<const operand> Q, K, V, Q_dot, K_dot, V_dot;
  Tensor<result> O;
  Tensor<real> lse;
  Tensor<result> O_dot;
  Tensor<real> lse_dot;
  int first_col = 0;  // of O and O_dot in this warp; the warp with column 0 stores lse and lse_dot
};

// Recomputes a query's results, and of O `width` columns, with one warp, unrounded, as repair_row()
// of nonfinite.cuh does.
template <int d, int dv, int width>
__device__ void repair_tangent(const Tangents& of, const Extent& extent, int query, int batch,
                               int its, int head, int kv_head, const Scorer<real>& scorer) {
  constexpr int count = cdiv(width, warp_size);
  const int lane = threadIdx.x % warp_size, end = min(of.first_col + width, dv);
  const auto q = of.Q.row(batch, head, query), q_dot = of.Q_dot.row(its, head, query);
  real maximum = extent.sink(), sum_dot = 0, o[count] = {}, o_dot[count] = {};
  real sum = maximum == -infinity ? real(0) : maximum - maximum + 1;  // NaN for an infinite sink
  for (int key = extent.kv_begin(query); key < extent.kv_end(query); ++key) {
    if (!extent.shown(query, key)) continue;
    const auto k = of.K.row(batch, kv_head, key), k_dot = of.K_dot.row(its, kv_head, key);
    const auto v = of.V.row(batch, kv_head, key), v_dot = of.V_dot.row(its, kv_head, key);
    real product = 0, moved = 0;
    for (int j = lane; j < d; j += warp_size) {
      product += real(q[j]) * real(k[j]);
      if (moves_q) moved += real(q_dot[j]) * real(k[j]);
      if (moves_k) moved += real(q[j]) * real(k_dot[j]);
    }
    const auto [score, slope] = scorer.with_slope(warp_sum(product), extent, query, key);
    const real before = maximum;
    maximum = fmax(maximum, score);
    const real origin = maximum == -infinity ? real(0) : maximum;
    const real factor = exp(before - origin), p = exp(score - origin);
    // A derivative that is not finite does not count where P or the slope is 0.
    const real p_slope = p == 0 ? real(0) : p * slope, s_dot = warp_sum(moved) * scorer.scale;
    const real p_dot = p_slope == 0 ? real(0) : p_slope * s_dot;
    sum = sum * factor + p;
    sum_dot = sum_dot * factor + p_dot;
    const real weight = extent.dropped(p, query, key), moves = extent.dropped(p_dot, query, key);
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const int col = of.first_col + lane + j * warp_size;
      if (col >= end) continue;
      o[j] = o[j] * factor + weight * real(v[col]);
      o_dot[j] = o_dot[j] * factor + moves * real(v[col]);
      if (moves_v) o_dot[j] += weight * real(v_dot[col]);
    }
  }
  const real inverse = sum == 0 ? real(0) : 1 / sum, mean = sum_dot * inverse;
#pragma unroll
  for (int j = 0; j < count; ++j) {
    const int col = of.first_col + lane + j * warp_size;
    if (col >= end) continue;
    const real out = o[j] * inverse;
    if (its == batch) of.O.row(batch, head, query)[col] = result(out);
    // Where O or lse_dot is infinite, there is no derivative: infinity - infinity is NaN.
    of.O_dot.row(its, head, query)[col] =
        result(o_dot[j] * inverse - mean * out + (out - out) + (mean - mean));
  }
  if (of.first_col + lane > 0) return;
  if (its == batch) *of.lse.row(batch, head, query) = maximum + log(sum);
  *of.lse_dot.row(its, head, query) = mean;
}

// Finishes a warp's rows. They are recomputed if scores are too large (nonfinite.cuh) or a sum is
// not finite: 0 * NaN of a masked key is NaN, and P S_dot may exceed 16 bits.
template <int d, int dv, int n>
__device__ __forceinline__ void finish(const Tangents& of, real (&O)[1][n][4],
                                       real (&O_dot)[1][n][4], const TangentRows& rows, int batch,
                                       int its, int head, int kv_head, const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::epilogue);
  const int lane = threadIdx.x % warp_size;
  bool wrong = overflows(rows);
  for (int i = 0; i < 2; ++i) wrong |= !(fabs(rows.sum_dot[0][i]) < infinity);
#pragma unroll
  for (int i = 0; i < n * 4; ++i)
    wrong |= !(fabs(O[0][i / 4][i % 4]) < infinity && fabs(O_dot[0][i / 4][i % 4]) < infinity);
  if (__any_sync(full_warp, wrong)) {
    const int first = __shfl_sync(full_warp, rows.first, 0);
    for (int row = first; row < min(first + step, rows.extent.M); ++row)
      repair_tangent<d, dv, n * 8>(of, rows.extent, row, batch, its, head, kv_head, scorer);
    return;
  }
  finish_rows(O, rows, of.lse, batch, head, lane, its == batch && of.first_col == 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    real sum = rows.sum[0][half], sum_dot = rows.sum_dot[0][half];
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      sum += __shfl_xor_sync(full_warp, sum, distance);
      sum_dot += __shfl_xor_sync(full_warp, sum_dot, distance);
    }
    const real inverse = sum == 0 ? real(0) : 1 / sum, mean = sum_dot * inverse;
    const real kept = inverse * rows.extent.kept_factor();
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      real& x = O_dot[0][j / 2][half * 2 + j % 2];
      x = x * kept - mean * O[0][j / 2][half * 2 + j % 2];
    }
    const int row = rows.row(0, half);
    if (of.first_col + lane % 4 == 0 && row < rows.extent.M) *of.lse_dot.row(its, head, row) = mean;
  }
  if (its == batch) store_output<dv>(O, rows, of.O, batch, head, lane, of.first_col);
  store_output<dv>(O_dot, rows, of.O_dot, its, head, lane, of.first_col);
}
