// begin_rows: computes the row statistics of `wgmma_columns` tile by tile: lse * log2(e) and D =
// rowsum(dO * O). Clears the accumulators of dQ, and of dK and dV where several blocks share a
// key tile, and the counts of tiles taken or of blocks that have added.
//
// `delta` and `clear_sums` do the same in two launches, with narrower loads and stores.
//
//   O, dO [batch, heads, M, dv]    lse [batch, heads, M]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   counts [batch, shares]    key_sums, key_counts [key_tiles, 2]
//   grid (cdiv(M, Br) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, Br, d, dv, threads, shared_bytes, has_dlse,
//   shares_groups
#include <backward/parts/query_layout.cuh>
#include <backward/parts/key_sums.cuh>
#include <backward/parts/register_tile.cuh>
#include <backward/parts/sum_tile.cuh>
#include <ptx/dependent_launch.cuh>

using Layout = QueryLayout<Br, d, dv>;
using Part = RegisterTile<Layout::width>;
using OfKeys = KeySums<Layout::width, cdiv(d, step) * step, cdiv(dv, step) * step>;

static_assert(shared_bytes == 0, "nothing is shared");

extern "C" __global__ __launch_bounds__(threads) void begin_rows(
    Tensor<const result> O, Tensor<const scalar> dO, Tensor<const real> lse, RowSums<Br>* row_sums,
    Part* dQ_sum, int* counts, OfKeys* key_sums, int* key_counts, int key_tiles, int M, int heads,
    int block_heads, Mods mods) {
  launch_dependents();
  const auto [tile, head, batch] = place_of_sums<Br>(M, heads, mods);
  float4* clear = reinterpret_cast<float4*>(dQ_sum + (long long)blockIdx.x * Layout::count);
  for (int i = threadIdx.x; i < int(Layout::count * sizeof(Part) / sizeof(float4)); i += threads)
    clear[i] = float4{0, 0, 0, 0};
  if (!ragged && threadIdx.x == 0 && tile == 0 && head % block_heads == 0)
    counts[(batch * heads + head) / block_heads] = 0;
  if constexpr (shares_groups) {
    float4* const sums = reinterpret_cast<float4*>(key_sums);
    const long long end = (long long)key_tiles * consumers * sizeof(OfKeys) / sizeof(float4);
    const long long first = (long long)blockIdx.x * threads + threadIdx.x;
    for (long long i = first; i < end; i += (long long)gridDim.x * threads)
      sums[i] = float4{0, 0, 0, 0};
    for (long long i = first; i < key_tiles * consumers; i += (long long)gridDim.x * threads)
      key_counts[i] = 0;
  }

  sum_tile<dv, threads>(O, dO, lse, row_sums[blockIdx.x], tile, head, batch, M, mods);
}
