// repair_split_gradients: recomputes flagged rows of dQ and keys of dK and dV from the float32
// inputs. A flag marks split operands that were not accurate.
//
// Flags are rare: a block without flagged rows or keys returns at once. For a flagged row the
// block's warps divide the keys, for a flagged key the rows. Rows and keys without a flag are not
// written. Large problems have a few flags by chance, and the launch then takes as long as the
// repair of one row. Each warp therefore keeps loads of several pairs in flight.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta, flags [batch, heads, M]    dK_flags, dV_flags [batch, kv_heads, N]
//   grid (query_blocks for tiles of rows, then blocks for tiles of keys)    block (threads)
//   the host sets: scalar, result, real, rows_of_block, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <attention/dropped_weights.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/repair_gradients.cuh>
#include <backward/parts/row_range.cuh>
#include <backward/parts/stats_in_memory.cuh>
#include <tile/shared.cuh>

constexpr int warps_of_block = threads / warp_size;
constexpr int most_columns = d > dv ? d : dv;
constexpr int together = most_columns > 64 ? 4 : 6;  // pairs per warp in flight

struct Shared {
  real sums[warps_of_block][most_columns];
  bool flagged[2][rows_of_block];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(rows_of_block <= threads, "a thread reads the flag of each row");

using Repairs = Repair<d, dv, scalar, StatsInMemory>;

// Reads the flag of the thread's row or key into `flagged` and returns it.
__device__ bool read_flag(bool (&flagged)[rows_of_block], Tensor<const unsigned char> flags,
                          int batch, int head, int first, int end) {
  const int own = first + threadIdx.x;
  const bool set = threadIdx.x < rows_of_block && own < end && *flags.row(batch, head, own) != 0;
  if (threadIdx.x < rows_of_block) flagged[threadIdx.x] = set;
  return set;
}

// Adds the lane's part of the dot product of rows a[i] and b[i] to products[i].
template <int cols>
__device__ __forceinline__ void multiply_rows(const scalar* const (&a)[together],
                                              const scalar* const (&b)[together],
                                              real (&products)[together]) {
#pragma unroll 4
  for (int turn = 0; turn < cdiv(cols, warp_size); ++turn) {
    const int j = turn * warp_size + threadIdx.x % warp_size;
    if (cols % warp_size != 0 && j >= cols) break;
#pragma unroll
    for (int i = 0; i < together; ++i) products[i] += real(a[i][j]) * real(b[i][j]);
  }
}

// Row-key pairs of one head that a warp processes together.
struct Pairs {
  int row[together], key[together];
  RawStats stats[together];

  // Adds the contributions of the pairs i with are_seen(i) to one row of dQ, dK or dV.
  template <char of, int cols, class AreSeen>
  __device__ __forceinline__ void add_to(RowSum<cols>& sum, const Repairs& inputs, int head,
                                         AreSeen are_seen) const {
    const scalar *q[together], *k[together], *grad[together], *v[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      q[i] = inputs.Q.row(inputs.batch, head, row[i]);
      k[i] = inputs.K.row(inputs.batch, inputs.kv_head, key[i]);
      grad[i] = inputs.dO.row(inputs.batch, head, row[i]);
      v[i] = inputs.V.row(inputs.batch, inputs.kv_head, key[i]);
    }
    real products[together] = {}, dP[together] = {};
    multiply_rows<d>(q, k, products);
    if (of != 'V') multiply_rows<dv>(grad, v, dP);
#pragma unroll
    for (int i = 0; i < together; ++i) {
      products[i] = warp_sum(products[i]);
      if (of != 'V') dP[i] = warp_sum(dP[i]);
    }
    const Extent& of_head = extent_of_head(inputs.extent, head);
    real weights[together] = {};
    bool seen[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      seen[i] = are_seen(i);  // a branch would serialize the pairs
      const auto [score, slope] = inputs.scorer.with_slope(products[i], of_head, row[i], key[i]);
      const real p = exp2(log_weight(score, stats[i].lse) * log2e);
      const real kept_dP = of_head.dropped(dP[i], row[i], key[i]);
      weights[i] = of == 'V' ? of_head.dropped(p, row[i], key[i])
                             : score_gradient(p, kept_dP - stats[i].delta, slope);
    }
#pragma unroll
    for (int j = 0; j < RowSum<cols>::count; ++j) {
      const int col = min(sum.first + j * warp_size, cols - 1);
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const real x = real((of == 'Q' ? k[i] : of == 'K' ? q[i] : grad[i])[col]);
        if (seen[i]) sum.sums[j] += weights[i] * x;  // hidden rows may hold NaN
      }
    }
  }
};

// Adds up the warps' sums of a row and writes the row.
template <int cols>
__device__ void write_row(Shared& shared, const RowSum<cols>& sum, result* row, real factor) {
  sum.store(shared.sums[threadIdx.x / warp_size], real(1));
  __syncthreads();  // all warps' sums are written
  for (int col = threadIdx.x; col < cols; col += threads) {
    real total = 0;
    for (int warp = 0; warp < warps_of_block; ++warp) total += shared.sums[warp][col];
    row[col] = result(total * factor);
  }
  __syncthreads();  // before the next row overwrites the sums
}

// Recomputes dQ of a row; its keys are distributed cyclically over the warps.
__device__ void repair_row(Shared& shared, const Repairs& inputs, Tensor<result> dQ, int head,
                           int row) {
  const Extent& extent = inputs.extent;
  const RawStats own = inputs.stats(head, row);
  RowSum<d> sum(0, d);
  const int end = own.lse != -infinity ? extent.kv_end(row) : 0;
  int key = extent.kv_begin(row) + threadIdx.x / warp_size;
  for (; key < end; key += together * warps_of_block) {
    Pairs pairs;
#pragma unroll
    for (int i = 0; i < together; ++i) {
      pairs.row[i] = row, pairs.stats[i] = own;
      pairs.key[i] = min(key + i * warps_of_block, end - 1);
    }
    pairs.add_to<'Q'>(sum, inputs, head, [&](int i) {
      return key + i * warps_of_block < end && extent.shown(row, pairs.key[i]);
    });
  }
  write_row(shared, sum, dQ.row(inputs.batch, head, row), inputs.scorer.scale);
}

// Recomputes dK or dV of a key; the rows of a head are distributed cyclically over the warps.
template <bool of_V>
__device__ void repair_key(Shared& shared, const Repairs& inputs, Tensor<result> gradient,
                           int group, int key) {
  constexpr int cols = of_V ? dv : d;
  const int first = row_begin(inputs.extent, key) + threadIdx.x / warp_size;
  RowSum<cols> sum(0, cols);
  for (int head = inputs.kv_head * group; head < (inputs.kv_head + 1) * group; ++head) {
    const Extent& extent = extent_of_head(inputs.extent, head);
    const int end = row_end(extent, key, 1);
    for (int row = first; row < end; row += together * warps_of_block) {
      Pairs pairs;
#pragma unroll
      for (int i = 0; i < together; ++i) {
        pairs.row[i] = min(row + i * warps_of_block, end - 1), pairs.key[i] = key;
        pairs.stats[i] = inputs.stats(head, pairs.row[i]);
      }
      pairs.add_to<of_V ? 'V' : 'K'>(sum, inputs, head, [&](int i) {
        return row + i * warps_of_block < end && pairs.stats[i].lse != -infinity &&
               extent.sees(pairs.row[i], key);
      });
    }
  }
  write_row(shared, sum, gradient.row(inputs.batch, inputs.kv_head, key),
            of_V ? real(1) : inputs.scorer.scale);
}

extern "C" __global__ __launch_bounds__(threads, 1) void repair_split_gradients(
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
    if (!__syncthreads_or(read_flag(shared.flagged[0], flags, batch, head, first, end))) return;
    for (int row = first; row < end; ++row)
      if (shared.flagged[0][row - first]) repair_row(shared, inputs, dQ, head, row);
    return;
  }
  const bool of_K = read_flag(shared.flagged[0], dK_flags, batch, head, first, end);
  const bool of_V = read_flag(shared.flagged[1], dV_flags, batch, head, first, end);
  if (!__syncthreads_or(of_K || of_V)) return;
  for (int key = first; key < end; ++key) {
    if (shared.flagged[0][key - first]) repair_key<false>(shared, inputs, dK, group, key);
    if (shared.flagged[1][key - first]) repair_key<true>(shared, inputs, dV, group, key);
  }
}
