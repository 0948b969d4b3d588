// finish_dQ: dQ from the sums that `wgmma_columns` has left, times the scale.
//
// They lie as registers of products do. A warp reads them so, and its lanes trade what they have of
// a row until each writes 16 bytes of it.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   grid (cdiv(M, Br) * heads * batch, parts)    block (threads)
//   the host sets: scalar, real, Br, d, dv, causal, windowed, threads, shared_bytes
#include <mma.cuh>
#include <quads.cuh>
#include <recompute_gradients.cuh>
#include <row_sums.cuh>

static_assert(shared_bytes == 0, "nothing is shared");
static_assert(threads == 4 * warp_size, "a warp has 16 rows of a part");

extern "C" __global__ __launch_bounds__(threads) void finish_dQ(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<scalar> dQ, const RowSums* row_sums, const Part* dQ_sum, int M, int N, int heads,
    int group, int diagonal, int lower, real scale) {
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(M, Br), heads);
  const int part = blockIdx.y, warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int first = warp * step + (by_rows_of_dQ ? part * warpgroup_rows : 0);
  const int first_col = by_columns_of_dQ ? part * part_width : 0;
  if (tile * Br + first >= M) return;

  const Part& own = dQ_sum[(long long)blockIdx.x * parts + part];
  float sums[part_width / 2];
#pragma unroll
  for (int i = 0; i < part_width / 8; ++i) {
    const float4 four = own.sums[i][threadIdx.x];
    sums[4 * i] = four.x, sums[4 * i + 1] = four.y;
    sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
  }
  if (is_strange(sums)) {
    recompute_rows<part_width>(Q, K, V, dO, dQ, row_sums, tile * Br + first, head, heads,
                               head / group, batch, M, N, diagonal, lower, scale, first_col);
    return;
  }
  const bool aligned = is_aligned(dQ);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned pairs[part_width / 8];
#pragma unroll
    for (int n = 0; n < part_width / 8; ++n)
      pairs[n] = pack<scalar>(sums[4 * n + 2 * half] * scale, sums[4 * n + 2 * half + 1] * scale);
    const int row = tile * Br + first + lane / 4 + half * 8;
    store_row<d>(dQ.row(batch, head, row), pairs, first_col, aligned, row < M, lane);
  }
}
