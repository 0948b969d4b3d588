// delta: computes D = rowsum(dO * O), which every element of dS needs.
//
// The softmax gradient is dS = P * (dO V^T - D) with D = rowsum(P * (dO V^T)). Because O = P V, D
// equals rowsum(dO * O). This is known before any score is computed, so that the tiles of a row are
// independent. A gradient of lse is subtracted from D. (Dao et al., 2022, arXiv:2205.14135,
// appendix B.2)
//
//   O, dO [batch, heads, M, dv]    D [batch, heads, M]
//   grid (cdiv(M, warps) * heads * batch)    block (threads), a warp for each row
//   the host sets: scalar, result, real, dv, threads, shared_bytes, has_dlse
#include <backward/parts/gradient_of_lse.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

static_assert(shared_bytes == 0, "nothing is shared");
static_assert(threads % warp_size == 0, "a warp sums a row");

extern "C" __global__ __launch_bounds__(threads) void delta(Tensor<const result> O,
                                                            Tensor<const scalar> dO, Tensor<real> D,
                                                            int M, int heads, Mods mods) {
  constexpr int rows = threads / warp_size;
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(M, rows), heads);
  const int row = tile * rows + threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  real sum = 0;
  if (row < M) {
    const result* output = O.row(batch, head, row);
    const scalar* gradient = dO.row(batch, head, row);
    for (int col = lane; col < dv; col += warp_size) sum += real(output[col]) * real(gradient[col]);
  }
  sum = warp_sum(sum);
  if (row < M && lane == 0)
    *D.row(batch, head, row) = sum - gradient_of_lse(mods, batch, head, row);
}
