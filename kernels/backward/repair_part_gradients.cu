// repair_part_gradients: computes again the rows of dQ and the keys of dK and dV that parts in
// float16 could not hold, from the float32 arrays.
//
// Flags are rare: a block whose rows or keys have none returns at once. For a row with one,
// the keys are divided among the warps of a block; for a key, the rows. The others are not touched.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta, flags [batch, heads, M]    dK_flags, dV_flags [batch, kv_heads, N]
//   grid (query_blocks for tiles of rows, then blocks for tiles of keys)    block (threads)
//   the host sets: scalar, result, real, rows_of_block, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <backward/parts/repair_gradients.cuh>
#include <backward/parts/stats_in_memory.cuh>
#include <tile/shared.cuh>

constexpr int warps_of_block = threads / warp_size;
constexpr int widest = d > dv ? d : dv;

struct Shared {
  real sums[warps_of_block][widest];
  bool flagged[2][rows_of_block];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(rows_of_block <= threads, "a thread reads the flag of each row");

using Repairs = Repair<d, dv, scalar, StatsInMemory>;

// Reads the flags of a block's rows. Returns whether one is set.
__device__ bool read_flags(bool (&flagged)[rows_of_block], Tensor<const unsigned char> flags,
                           int batch, int head, int first, int end) {
  const int own = first + threadIdx.x;
  const bool set = threadIdx.x < rows_of_block && own < end && *flags.row(batch, head, own) != 0;
  if (threadIdx.x < rows_of_block) flagged[threadIdx.x] = set;
  return __syncthreads_or(set);
}

// Adds up what the warps have of a row, and writes it.
template <int cols>
__device__ void write_row(Shared& shared, const RowSum<cols>& sum, result* row, real factor) {
  sum.store(shared.sums[threadIdx.x / warp_size], real(1));
  __syncthreads();  // all warps' sums are there
  for (int col = threadIdx.x; col < cols; col += threads) {
    real total = 0;
    for (int warp = 0; warp < warps_of_block; ++warp) total += shared.sums[warp][col];
    row[col] = result(total * factor);
  }
  __syncthreads();  // before the sums of the next row overwrite them
}

// dQ of a row. Warps take keys in turn.
__device__ void repair_row(Shared& shared, const Repairs& inputs, Tensor<result> dQ, int head,
                           int row) {
  const Extent& extent = inputs.extent;
  const RowStats own = inputs.stats(head, row);
  RowSum<d> sum(0, d);
  const int end = own.sees_keys() ? extent.kv_end(row) : 0;
  for (int key = extent.kv_begin(row) + threadIdx.x / warp_size; key < end; key += warps_of_block)
    if (extent.shown(row, key))
      sum.add(inputs.pair(head, row, key, own).dS, inputs.K.row(inputs.batch, inputs.kv_head, key));
  write_row(shared, sum, dQ.row(inputs.batch, head, row), inputs.scorer.scale);
}

// dK, or dV, of a key. Warps take rows of each head in turn.
template <bool of_V>
__device__ void repair_key(Shared& shared, const Repairs& inputs, Tensor<result> gradient,
                           int group, int key) {
  constexpr int cols = of_V ? dv : d;
  const int first = inputs.extent.row_begin(key) + threadIdx.x / warp_size;
  RowSum<cols> sum(0, cols);
  for (int head = inputs.kv_head * group; head < (inputs.kv_head + 1) * group; ++head) {
    const Extent& extent = inputs.extent.of_head(head);
    for (int row = first; row < extent.row_end(key, 1); row += warps_of_block) {
      const RowStats own = inputs.stats(head, row);
      if (!own.sees_keys() || !extent.sees(row, key)) continue;
      const auto made = inputs.pair(head, row, key, own);
      sum.add(of_V ? made.p : made.dS, (of_V ? inputs.dO : inputs.Q).row(inputs.batch, head, row));
    }
  }
  write_row(shared, sum, gradient.row(inputs.batch, inputs.kv_head, key),
            of_V ? real(1) : inputs.scorer.scale);
}

extern "C" __global__ __launch_bounds__(threads) void repair_part_gradients(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const real> lse, Tensor<const real> delta, Tensor<const unsigned char> flags,
    Tensor<const unsigned char> dK_flags, Tensor<const unsigned char> dV_flags, Tensor<result> dQ,
    Tensor<result> dK, Tensor<result> dV, Sizes sizes, int query_blocks, int heads, int kv_heads,
    int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const int index = blockIdx.x;
  const bool of_rows = index < query_blocks;
  const auto [tile, head, batch] =
      of_rows ? place_of_rows<rows_of_block>(index, sizes, mods, heads)
              : place_of_keys<rows_of_block>(index - query_blocks, sizes, mods, kv_heads);
  const int first = tile * rows_of_block;
  const Extent extent = extent_of(sizes, mods, batch, of_rows ? head : head * group);
  const int kv_head = of_rows ? head / group : head;
  const int end = min(first + rows_of_block, of_rows ? extent.M : extent.N);
  if (first < 0 || first >= end) return;
  const Repairs inputs = {extent, Q, K, V, dO, {lse, delta, batch}, {scale, mods}, batch, kv_head};
  if (of_rows) {
    if (!read_flags(shared.flagged[0], flags, batch, head, first, end)) return;
    for (int row = first; row < end; ++row)
      if (shared.flagged[0][row - first]) repair_row(shared, inputs, dQ, head, row);
    return;
  }
  const bool some_of_K = read_flags(shared.flagged[0], dK_flags, batch, head, first, end);
  const bool some_of_V = read_flags(shared.flagged[1], dV_flags, batch, head, first, end);
  if (!some_of_K && !some_of_V) return;
  for (int key = first; key < end; ++key) {
    if (shared.flagged[0][key - first]) repair_key<false>(shared, inputs, dK, group, key);
    if (shared.flagged[1][key - first]) repair_key<true>(shared, inputs, dV, group, key);
  }
}
