// merge_parts_gradients: computes the gradients of merge_parts with respect to its parts.
//
// With w_i = exp(lse_i - lse), the gradients are dout_i = w_i * dO and
// dlse_i = w_i * (rowsum(dO * (out_i - O)) + dlse). This follows from d w_i / d lse_j = w_i * ((i
// == j) - w_j).
//
//   O, dO [batch, heads, M, dv]    lse, dlse [batch, heads, M]    parts, gradients: `count` each
//   grid (cdiv(rows, threads / lanes)), rows = batch * heads * M    block (threads), `lanes` a row
//   the host sets: scalar, real, room, vector, lanes, threads, has_dlse
#include <merge/parts.cuh>

extern "C" __global__ __launch_bounds__(threads) void merge_parts_gradients(
    Tensor<const scalar> O, Tensor<const real> lse, Tensor<const scalar> dO,
    Tensor<const real> dlse, int M, int heads, long long rows, int dv, int count,
    const __grid_constant__ Parts<const scalar, const real> parts,
    const __grid_constant__ Parts<scalar, real> gradients) {
  // Threads past the last row recompute it, because the shuffles need all lanes of a warp.
  const unsigned long long number = row_of_thread();
  const bool inside = number < rows;
  const Row row = row_numbered(inside ? number : rows - 1, M, heads);
  const int lane = threadIdx.x % lanes;
  const real of_all = *at(lse, row);
  real of_lse = 0;
  if constexpr (has_dlse) of_lse = *at(dlse, row);
  const scalar *all = at(O, row), *slope = at(dO, row);

  for (int i = 0; i < count; ++i) {
    const real part_lse = *at(parts.part[i].lse, row);
    const bool counts = !adds_nothing(part_lse);
    const real weight = weight_of(part_lse, of_all);
    const scalar* out = at(parts.part[i].out, row);
    scalar* gradient = at(gradients.part[i].out, row);
    real sum = 0;
    for (int col = lane * width; col < dv; col += lanes * width) {
      Columns part, merged, dout, made;
      part.load(out, col, dv);
      merged.load(all, col, dv);
      dout.load(slope, col, dv);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        sum = fma(real(dout[j]), real(part[j]) - real(merged[j]), sum);
        made[j] = scalar(counts ? weight * real(dout[j]) : real(0));
      }
      if (inside) made.store(gradient, col, dv);
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(full_warp, sum, distance);
    if (inside && lane == 0)
      *at(gradients.part[i].lse, row) = counts ? weight * (sum + of_lse) : real(0);
  }
}
