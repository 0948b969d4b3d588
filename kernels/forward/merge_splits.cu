// merge_splits: rows of O from the results of several blocks, one for each split of the keys.
//
// A split's sums are relative to its own maximum. They are rescaled to the largest maximum of all
// splits, added up, always in the same order, and divided once: the online softmax of splits
// instead of tiles. A split without a visible key has sums 0 and the lowest maximum, and adds
// nothing. A row that comes out wrong is computed again here, from Q, K and V.
//
//   Q [batch, heads, M, d]    K, V [batch, kv_heads, N, d | dv]
//   O_splits [batch, heads, M, num_splits, width]
//   max_splits, sum_splits [batch, heads, M, num_splits]
//   O [batch, heads, M, dv]    lse [batch, heads, M]
//   grid (M * heads * batch; 1 if there is one split)    block (threads): a warp takes every fourth
//   split, a lane four columns of each 128
//   the host sets: scalar, result, operand, real, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <attention/nonfinite.cuh>
#include <attention/score.cuh>
#include <attention/stored.cuh>
#include <tile/math.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr int width = cdiv(dv, 16) * 16;
constexpr int rounds = cdiv(width, 4 * warp_size);
constexpr int warps = threads / warp_size;
static_assert(threads % warp_size == 0, "shuffles need whole warps");

struct Shared {
  float O[warps][width];
  float sum[warps];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

extern "C" __global__ __launch_bounds__(threads) void merge_splits(
    const float* O_splits, const float* max_splits, const float* sum_splits, Tensor<result> O,
    Tensor<real> lse, int num_splits, Tensor<const operand> Q, StoredKeys K, StoredValues V,
    Sizes sizes, int heads, int group, real scale, Mods mods) {
  if (num_splits == 1) return;  // its block has written the rows
  Shared& shared = shared_memory<Shared>();
  const auto [row, head, batch] = place(blockIdx.x, sizes.M, heads);
  if (!extent_of(sizes, mods, batch).has_tile_of_rows(row)) return;  // no split has written it
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const long long first = (long long)blockIdx.x * num_splits;

  float maximum = max_splits[first];
  for (int split = lane; split < num_splits; split += warp_size) {
    maximum = fmax(maximum, max_splits[first + split]);
  }
  maximum = warp_max(maximum);

  float sum = 0;
  float4 o[rounds] = {};
#pragma unroll 4
  for (int split = warp; split < num_splits; split += warps) {
    const float factor = exp2f(max_splits[first + split] - maximum);
    sum += factor * sum_splits[first + split];
    const float* from = O_splits + (first + split) * width;
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int col = 4 * (lane + i * warp_size);
      if (col >= width) continue;
      const float4 x = *reinterpret_cast<const float4*>(from + col);
      o[i].x += factor * x.x, o[i].y += factor * x.y;
      o[i].z += factor * x.z, o[i].w += factor * x.w;
    }
  }
  if (lane == 0) shared.sum[warp] = sum;
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    const int col = 4 * (lane + i * warp_size);
    if (col < width) *reinterpret_cast<float4*>(&shared.O[warp][col]) = o[i];
  }
  __syncthreads();  // every warp's sums are there

  sum = 0;
  for (int i = 0; i < warps; ++i) sum += shared.sum[i];
  const Extent extent = extent_of(sizes, mods, batch, head);
  const float inverse = sum == 0 ? 0.0f : extent.kept_factor() / sum;
  const bool has_score =
      (has_sink || extent.kv_begin(row) < extent.kv_end(row)) && !(has_seat && sum == 0);
  bool wrong = !(sum < infinity) || (has_score && is_huge(maximum));
  result* out = O.row(batch, head, row);
  for (int col = threadIdx.x; col < dv; col += threads) {
    float total = 0;
    for (int i = 0; i < warps; ++i) total += shared.O[i][col];
    out[col] = result(total * inverse);
    wrong |= total != total;
  }
  if (threadIdx.x == 0) *lse.row(batch, head, row) = maximum * ln2 + log(sum);
  // The barrier comes before the repair overwrites what other threads wrote.
  if (__syncthreads_or(wrong) && warp == 0)
    repair_row<d, dv>(Q, rows_of(K, mods), rows_of(V, mods), O, lse, extent, row, batch, head,
                      head / group, Scorer<real>{scale, mods});
}
