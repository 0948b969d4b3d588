// merge_splits: rows of O from the results of several blocks, as merge_parts.cuh says, where the
// blocks of mma_split_kv do not merge them themselves.
//
// A row that comes out wrong is computed again here, from Q, K and V.
//
//   Q [batch, heads, M, d]    K, V [batch, kv_heads, N, d | dv]
//   parts, weights [batch, heads, M, num_splits]    O [batch, heads, M, dv]    lse [batch, heads,
//   M] grid (M * heads * batch; 0 if there is nothing to merge)    block (threads): a warp takes
//   every fourth split, a lane four columns of each 128 the host sets: scalar, operand, real, d,
//   dv, threads, shared_bytes and options (score.cuh)
#include <attention/stored.cuh>
#include <forward/parts/merge_parts.cuh>
#include <tile/shared.cuh>

constexpr int part_width = Part<dv>::width;
constexpr int rounds = cdiv(part_width, 4 * warp_size);
constexpr int warps = threads / warp_size;
static_assert(threads == chains * warp_size, "a warp makes a sum of every fourth split");

struct Shared {
  float O[warps][part_width];
  float sum[warps];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

extern "C" __global__ __launch_bounds__(threads) void merge_splits(
    const Part<dv>* parts, const Weight* weights, Tensor<scalar> O, Tensor<real> lse,
    int num_splits, Tensor<const operand> Q, Tensor<const Stored> K, Tensor<const Stored> V,
    Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [row, head, batch] = place(blockIdx.x, sizes.M, heads);
  if (!extent_of(sizes, mods, batch).has_tile_of_rows(row)) return;  // no split has written it
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  parts += (long long)blockIdx.x * num_splits, weights += (long long)blockIdx.x * num_splits;

  float maximum = weights[0].maximum;
  for (int split = lane; split < num_splits; split += warp_size)
    maximum = fmax(maximum, weights[split].maximum);
  maximum = warp_max(maximum);

  float sum = 0;
  float4 o[rounds] = {};
#pragma unroll 4
  for (int split = warp; split < num_splits; split += warps) {
    const float factor = exp2f(weights[split].maximum - maximum);
    sum += factor * weights[split].sum;
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int col = 4 * (lane + i * warp_size);
      if (col >= part_width) continue;
      const float4 x = *reinterpret_cast<const float4*>(&parts[split].O[col]);
      o[i].x += factor * x.x, o[i].y += factor * x.y;
      o[i].z += factor * x.z, o[i].w += factor * x.w;
    }
  }
  if (lane == 0) shared.sum[warp] = sum;
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    const int col = 4 * (lane + i * warp_size);
    if (col < part_width) *reinterpret_cast<float4*>(&shared.O[warp][col]) = o[i];
  }
  __syncthreads();  // every warp's sums are there

  sum = 0;
  for (int i = 0; i < warps; ++i) sum += shared.sum[i];
  const Extent extent = extent_of(sizes, mods, batch, head);
  const float inverse = inverse_of(sum, extent);
  bool wrong = is_wrong(sum, maximum, extent, row);
  scalar* out = O.row(batch, head, row);
  for (int col = threadIdx.x; col < dv; col += threads) {
    float total = 0;
    for (int i = 0; i < warps; ++i) total += shared.O[i][col];
    out[col] = scalar(total * inverse);
    wrong |= total != total;
  }
  if (threadIdx.x == 0) *lse.row(batch, head, row) = maximum * ln2 + log(sum);
  // The barrier comes before the repair overwrites what other threads wrote.
  if (__syncthreads_or(wrong) && warp == 0)
    repair_row<d, dv>(Q, keys_of(K, mods), values_of(V, mods), O, lse, extent, row, batch, head,
                      head / group, Scorer<real>{scale, mods});
}
