// finish_rows: dQ from the sums that `wgmma_columns` has left, times the scale.
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

// dQ of 16 rows from a column on, by the keys that each row sees alone.
__device__ void recompute_rows(Tensor<const scalar> Q, Tensor<const scalar> K,
                               Tensor<const scalar> V, Tensor<const scalar> dO, Tensor<scalar> dQ,
                               const RowSums& sums, int tile, int first, int head, int kv_head,
                               int batch, int M, int N, int diagonal, int lower, float scale,
                               int first_col) {
  constexpr int count = cdiv(part_width, warp_size);
  const int lane = threadIdx.x % warp_size;
  for (int i = first; i < first + step; ++i) {
    const int row = tile * Br + i;
    if (row >= M) return;
    const scalar *q = Q.row(batch, head, row), *grad = dO.row(batch, head, row);
    float gradient[count] = {};
    const int end = sums.counts(i) ? visible_keys(row, N, diagonal) : 0;
    for (int key = hidden_keys(row, N, lower); key < end; ++key) {
      const scalar *k = K.row(batch, kv_head, key), *v = V.row(batch, kv_head, key);
      const Pair pair = weigh_pair(q, k, grad, v, sums.lse2[i], sums.delta[i], scale, lane);
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const int col = first_col + lane + j * warp_size;
        if (col < d) gradient[j] += pair.slope * float(k[col]);
      }
    }
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const int own = lane + j * warp_size;
      if (own < part_width && first_col + own < d)
        dQ.row(batch, head, row)[first_col + own] = scalar(gradient[j] * scale);
    }
  }
}

extern "C" __global__ __launch_bounds__(threads) void finish_rows(
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
    recompute_rows(Q, K, V, dO, dQ, row_sums[blockIdx.x], tile, first, head, head / group, batch, M,
                   N, diagonal, lower, scale, first_col);
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
