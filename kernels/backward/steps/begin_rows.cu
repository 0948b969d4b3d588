// begin_rows: computes the row statistics of `wgmma_columns` tile by tile: lse * log2(e) and D =
// rowsum(dO * O). Clears the accumulators of dQ, those of dK and dV if blocks share key tiles, and
// the counts of tiles taken and of blocks that have added.
//
// `delta` and `clear_sums` do the same in two launches, with narrower loads and stores.
//
//   O, dO [batch, heads, M, dv]    lse [batch, heads, M]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   counts [counts_size]    key_sums [key_sums_size]
//   grid (cdiv(M, Br) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, Br, d, dv, threads, shared_bytes, has_dlse
#include <backward/parts/query_layout.cuh>
#include <backward/parts/register_tile.cuh>
#include <backward/parts/sum_tile.cuh>
#include <ptx/dependent_launch.cuh>

using Layout = QueryLayout<Br, d, dv>;
using Part = RegisterTile<Layout::width>;

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void begin_rows(
    Tensor<const result> O, Tensor<const scalar> dO, Tensor<const real> lse, RowSums<Br>* row_sums,
    Part* dQ_sum, int* counts, int counts_size, float4* key_sums, int key_sums_size, int M,
    int heads, Mods mods) {
  launch_dependents();
  const auto [tile, head, batch] = place_of_sums<Br>(M, heads, mods);
  float4* clear = reinterpret_cast<float4*>(dQ_sum + (long long)blockIdx.x * Layout::count);
  for (int i = threadIdx.x; i < int(Layout::count * sizeof(Part) / sizeof(float4)); i += threads)
    clear[i] = float4{0, 0, 0, 0};
  const long long own = (long long)blockIdx.x * threads + threadIdx.x;
  const long long all = (long long)gridDim.x * threads;
#pragma unroll 1
  for (long long i = own; i < key_sums_size; i += all) key_sums[i] = float4{0, 0, 0, 0};
#pragma unroll 1
  for (long long i = own; i < counts_size; i += all) counts[i] = 0;

  sum_tile<dv, threads>(O, dO, lse, row_sums[blockIdx.x], tile, head, batch, M, mods);
}
