// begin_rows: what `wgmma_columns` needs of rows before it begins, tile by tile: lse * log2(e), D =
// rowsum(dO * O), and zeros for the sums of dQ.
//
// Eight lanes sum a row, and read whole cache lines of it. `delta` and `clear_sums` do the same in
// two launches, an element for each thread.
//
//   O, dO [batch, heads, M, dv]    lse [batch, heads, M]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   grid (cdiv(M, Br) * heads * batch)    block (threads)
//   the host sets: scalar, real, Br, d, dv, threads, shared_bytes
#include <row_sums.cuh>
#include <tensor.cuh>
#include <warp.cuh>

constexpr int lanes = 8;  // for each row
static_assert(shared_bytes == 0, "nothing is shared");
static_assert(threads % warp_size == 0 && Br % (threads / lanes) == 0, "rows in whole turns");

// The sum of products of eight elements.
__device__ __forceinline__ float dot(const uint4& x, const uint4& y) {
  const scalar* a = reinterpret_cast<const scalar*>(&x);
  const scalar* b = reinterpret_cast<const scalar*>(&y);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += float(a[i]) * float(b[i]);
  return sum;
}

extern "C" __global__ __launch_bounds__(threads) void begin_rows(Tensor<const scalar> O,
                                                                 Tensor<const scalar> dO,
                                                                 Tensor<const real> lse,
                                                                 RowSums* row_sums, Part* dQ_sum,
                                                                 int M, int heads) {
  const auto [tile, head, batch] = place(blockIdx.x, cdiv(M, Br), heads);
  const int lane = threadIdx.x % lanes;

  float4* clear = reinterpret_cast<float4*>(dQ_sum + (long long)blockIdx.x * parts);
  for (int i = threadIdx.x; i < int(parts * sizeof(Part) / sizeof(float4)); i += threads)
    clear[i] = float4{0, 0, 0, 0};

  const bool aligned = dv % 8 == 0 && is_aligned(O) && is_aligned(dO);
#pragma unroll
  for (int i = 0; i < Br; i += threads / lanes) {
    const int own = i + threadIdx.x / lanes, row = tile * Br + own;
    float sum = 0;
    if (row < M) {
      const scalar* output = O.row(batch, head, row);
      const scalar* gradient = dO.row(batch, head, row);
      if (aligned) {
#pragma unroll
        for (int j = 0; j < cdiv(dv, 8 * lanes); ++j) {
          const int piece = j * lanes + lane;
          if (piece < dv / 8)
            sum += dot(reinterpret_cast<const uint4*>(output)[piece],
                       reinterpret_cast<const uint4*>(gradient)[piece]);
        }
      } else {
        for (int col = lane; col < dv; col += lanes)
          sum += float(output[col]) * float(gradient[col]);
      }
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(full_warp, sum, distance);
    if (lane == 0) {
      const float own_lse = row < M ? *lse.row(batch, head, row) : -infinity;
      const bool counts = own_lse != -infinity;
      row_sums[blockIdx.x].lse2[own] = counts ? own_lse * log2e : infinity;
      row_sums[blockIdx.x].delta[own] = counts ? sum : 0.0f;
    }
  }
}
