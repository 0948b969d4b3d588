// merge_splits: merges the results of all splits of the keys into rows of O (Flash-Decoding).
//
// The sums of a split are relative to its own maximum. They are rescaled to the largest maximum so
// far, added in a fixed order, and divided once: an online softmax over splits. A split without
// visible keys has sums of 0 and the lowest maximum. Rows with wrong results are recomputed here.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_splits [batch, heads, M, most_splits, width]    max_splits, sum_splits [..., most_splits]
//   grid (M * heads * batch)    block (threads): the warps share the splits and load `at_once` of
//   them at a time; a lane owns four of every 128 columns
//   the host sets: scalar, result, operand, real, at_once, d, dv, threads, shared_bytes, options
#include <attention/kv_dtype.cuh>
#include <attention/nonfinite.cuh>
#include <attention/row_max.cuh>
#include <attention/score.cuh>
#include <forward/parts/split_order.cuh>
#include <ptx/dependent_launch.cuh>
#include <tile/math.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <tile/warp_max.cuh>

constexpr int width = cdiv(dv, 16) * 16;
constexpr int rounds = cdiv(width, 4 * warp_size);
constexpr int warps = threads / warp_size;
static_assert(threads % warp_size == 0, "splits are divided among whole warps");

struct Shared {
  float O[warps][width];
  float maximum[warps], sum[warps];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

extern "C" __global__ __launch_bounds__(threads) void merge_splits(
    const float* O_splits, const float* max_splits, const float* sum_splits, Tensor<result> O,
    Tensor<real> lse, int planned, Tensor<const operand> Q, StoredKeys K, StoredValues V,
    Sizes sizes, int heads, int group, real scale, Mods mods) {
  if (!balances || planned > 1) launch_dependents();  // else the next call crowds some SMs
  const int num_splits = splits_of(planned, blockIdx.x, heads, sizes, mods);
  const bool is_written = balances && num_splits == 1;           // by the only split
  if (!is_written || blockIdx.x == 0) wait_for_launch_before();  // else one block's wait is enough
  if (is_written) return;
  Shared& shared = shared_memory<Shared>();
  const auto [row, head, batch] = place(blockIdx.x, sizes.M, heads);
  if (!extent_of(sizes, mods, batch).has_tile_of_rows(row)) return;  // no split computed this row
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const long long first = (long long)blockIdx.x * (balances ? most_splits : num_splits);

  float maximum = -largest, sum = 0;
  float4 o[rounds] = {};
  for (int split = warp; split < num_splits; split += warps * at_once) {
    float maxima[at_once], sums[at_once];
    float4 x[at_once][rounds];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      // Indices past the end read the last split instead, so that loads are unconditional.
      const long long place = first + min(split + i * warps, num_splits - 1);
      maxima[i] = max_splits[place * stored_maxima], sums[i] = sum_splits[place];
#pragma unroll
      for (int j = 0; j < rounds; ++j) {
        const int col = min(4 * (lane + j * warp_size), width - 4);
        x[i][j] = *reinterpret_cast<const float4*>(O_splits + place * width + col);
      }
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i)
      if (split + i * warps >= num_splits) maxima[i] = -largest, sums[i] = 0;
    const float before = maximum;
#pragma unroll
    for (int i = 0; i < at_once; ++i) maximum = fmax(maximum, maxima[i]);
    const float kept = exp2f(before - maximum);
    sum *= kept;
#pragma unroll
    for (int j = 0; j < rounds; ++j) {
      o[j].x *= kept, o[j].y *= kept, o[j].z *= kept, o[j].w *= kept;
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const bool exists = split + i * warps < num_splits;
      const float factor = exists ? exp2f(maxima[i] - maximum) : 0.0f;
      sum += factor * sums[i];
#pragma unroll
      for (int j = 0; j < rounds; ++j) {
        o[j].x += factor * x[i][j].x, o[j].y += factor * x[i][j].y;
        o[j].z += factor * x[i][j].z, o[j].w += factor * x[i][j].w;
      }
    }
  }
  if (lane == 0) shared.maximum[warp] = maximum, shared.sum[warp] = sum;
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    const int col = 4 * (lane + i * warp_size);
    if (col < width) *reinterpret_cast<float4*>(&shared.O[warp][col]) = o[i];
  }
  __syncthreads();  // every warp's sums are written

  float factor[warps];
#pragma unroll
  for (int i = 0; i < warps; ++i) maximum = fmax(maximum, shared.maximum[i]);
  sum = 0;
#pragma unroll
  for (int i = 0; i < warps; ++i) {
    factor[i] = exp2f(shared.maximum[i] - maximum);
    sum += factor[i] * shared.sum[i];
  }
  const Extent extent = extent_of(sizes, mods, batch, head);
  const float inverse = sum == 0 ? 0.0f : extent.kept_factor() / sum;
  bool wrong = has_overflowed(maximum, sum, extent.kv_begin(row) < extent.kv_end(row));
  result* out = O.row(batch, head, row);
  for (int col = threadIdx.x; col < dv; col += threads) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) total += factor[i] * shared.O[i][col];
    out[col] = result(total * inverse);
    wrong |= total != total;
  }
  if (threadIdx.x == 0) *lse.row(batch, head, row) = maximum * ln2 + log(sum);
  if constexpr (has_row_max) {
    float largest_score = -infinity;
    for (int split = lane; split < num_splits; split += warp_size)
      largest_score = fmax(largest_score, max_splits[(first + split) * stored_maxima + 1]);
    largest_score = warp_max(largest_score);
    if (threadIdx.x == 0) write_row_max(extent, row, largest_score, sum);
  }
  // All threads must have stored their columns before the repair overwrites them.
  if (__syncthreads_or(wrong) && warp == 0)
    repair_row<d, dv>(Q, rows_of(K, mods), rows_of(V, mods), O, lse, extent, row, batch, head,
                      head / group, Scorer<real>{scale, mods});
}
