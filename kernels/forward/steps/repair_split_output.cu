// repair_split_output: recomputes flagged rows, whose split operands were not accurate, from the
// float32 arrays.
//
// Flagged rows are rare: a block without flagged rows returns at once. If the values of a flagged
// row turn out to be large enough (cancellation.cuh), the row is accurate and its flag becomes 0.
// Otherwise the keys of the row are divided among the warps of a block. Rows without a flag are not
// touched, so that their bits do not depend on their neighbours.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse, flags [batch, heads, M]    V_exponents, small_values: see split_operands.cu
//   grid (cdiv(M, rows_of_block) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, rows_of_block, counted, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/row_max.cuh>
#include <attention/score.cuh>
#include <attention/tile_index.cuh>
#include <forward/parts/split_f32/cancellation.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/times_two_to.cuh>
#include <tile/warp.cuh>

constexpr int warps = threads / warp_size;
constexpr int together = 4;  // keys whose loads and sums are in flight at the same time

struct Shared {
  real maximum[warps], sum[warps];
  real output[warps][dv];
  unsigned char flags[rows_of_block];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(rows_of_block <= threads, "one thread reads the flag of one row");

// Returns whether a flagged row of O is accurate after all: no column with a small element has too
// many small values. `counts` holds the number of small values for each `counted` keys.
__device__ bool is_held(int flag, const result* row, const int* exponents,
                        const unsigned char* counts, int keys) {
  bool held = flag > 1;
  for (int col = threadIdx.x; held && col < dv; col += threads) {
    if (exponents[col] == -127 ||
        fabs(times_two_to(row[col], split_exponent - exponents[col])) >= least_share)
      continue;
    int small = 0;
    for (int block = 0; block < cdiv(keys, counted); ++block) small += counts[block * dv + col];
    held = small < many_of_flag(flag);
  }
  return __syncthreads_and(held);
}

// A lane's columns of a row: every 32nd column.
template <int cols>
struct Columns {
  static constexpr int count = cdiv(cols, warp_size);
  real x[count];

  __device__ __forceinline__ void load(const scalar* row, int lane) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int col = lane + i * warp_size;
      x[i] = cols % warp_size == 0 || col < cols ? real(row[col]) : real(0);
    }
  }
};

// The softmax of a row over a subset of the keys, before normalization.
struct Sums {
  real maximum = -infinity, sum = 0;
  Columns<dv> output = {};

  // Adds a key with score x. `kept` is the factor that dropout applies to its weight.
  __device__ __forceinline__ void add(real x, real kept, const Columns<dv>& v) {
    const real before = maximum;
    maximum = fmax(maximum, x);
    const real origin = maximum == -infinity ? real(0) : maximum;
    const real factor = exp(before - origin), p = exp(x - origin);
    sum = sum * factor + p;
#pragma unroll
    for (int i = 0; i < Columns<dv>::count; ++i)
      output.x[i] = output.x[i] * factor + p * kept * v.x[i];
  }
};

// Computes a row's sums over keys first … end - 1 by one warp, without divergent loops.
__device__ __forceinline__ Sums attend(const scalar* q, Tensor<const scalar> K,
                                       Tensor<const scalar> V, const Extent& extent, int query,
                                       int batch, int kv_head, int first, int end,
                                       const Scorer<real>& scorer) {
  const int lane = threadIdx.x % warp_size;
  Sums sums;
  Columns<d> row;
  row.load(q, lane);
  for (int from = first; from < end; from += together) {
    real products[together] = {};
    Columns<dv> v[together];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int key = min(from + j, end - 1);
      Columns<d> k;
      k.load(K.row(batch, kv_head, key), lane);
      v[j].load(V.row(batch, kv_head, key), lane);
#pragma unroll
      for (int i = 0; i < Columns<d>::count; ++i) products[j] += row.x[i] * k.x[i];
    }
#pragma unroll
    for (int j = 0; j < together; ++j) products[j] = warp_sum(products[j]);
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int key = from + j;
      if (key >= end || !extent.shown(query, key)) continue;
      const real x = scorer.modified(products[j], extent, query, key);
      sums.add(x, extent.dropped(real(1), query, key), v[j]);
    }
  }
  return sums;
}

// Adds the warps' sums in shared memory and writes the row's O and lse; each thread owns columns.
template <int count>
__device__ void write_row(const Shared& shared, const Extent& extent, int row, scalar* out,
                          real* lse) {
  real maximum = extent.sink(), sum = 0, o[count] = {};
  for (int warp = 0; warp < warps; ++warp) maximum = fmax(maximum, shared.maximum[warp]);
  const real origin = maximum == -infinity ? real(0) : maximum;
  for (int warp = 0; warp < warps; ++warp) {
    const real factor = exp(shared.maximum[warp] - origin);
    sum += shared.sum[warp] * factor;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int col = threadIdx.x + i * threads;
      if (col < dv) o[i] += shared.output[warp][col] * factor;
    }
  }
  if (const real sink = extent.sink(); sink != -infinity)
    sum += exp(sink - origin) * (sink - sink + 1);    // NaN if the sink is infinite
  const real inverse = sum == 0 ? real(0) : 1 / sum;  // a NaN from V stays NaN
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int col = threadIdx.x + i * threads;
    if (col < dv) out[col] = result(o[i] * inverse);
  }
  if (threadIdx.x == 0) *lse = maximum + log(sum);
  if constexpr (has_row_max) {
    real largest_score = -infinity;
    for (const real x : shared.maximum) largest_score = fmax(largest_score, x);
    if (threadIdx.x == 0) write_row_max(extent, row, largest_score, sum);
  }
}

extern "C" __global__ __launch_bounds__(threads) void repair_split_output(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V,
    Tensor<unsigned char> flags, const int* V_exponents, const unsigned char* small_values,
    Tensor<result> O, Tensor<real> lse, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, head, batch] = place_of_rows<rows_of_block>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  const int first = tile * rows_of_block, own = first + threadIdx.x;
  if (!extent.has_tile_of_rows(first)) return;
  int flag = 0;
  if (threadIdx.x < rows_of_block && own < extent.M) flag = *flags.row(batch, head, own);
  if (threadIdx.x < rows_of_block) shared.flags[threadIdx.x] = flag;
  if (!__syncthreads_or(flag)) return;
  const Scorer<real> scorer = {scale, mods};
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  for (int row = first; row < min(first + rows_of_block, extent.M); ++row) {
    if (shared.flags[row - first] == 0) continue;
    if constexpr (counts_values) {
      const long long kv_head = (long long)batch * (heads / group) + head / group;
      const bool held =
          is_held(shared.flags[row - first], O.row(batch, head, row), V_exponents + kv_head * dv,
                  small_values + kv_head * cdiv(extent.N, counted) * dv, extent.N);
      if (threadIdx.x == 0) *flags.row(batch, head, row) = !held;
      if (held) continue;
    }
    const int begin = extent.kv_begin(row), end = extent.kv_end(row);
    const int share = cdiv(cdiv(max(end - begin, 0), warps), together) * together;
    const int own_begin = min(begin + warp * share, end), own_end = min(own_begin + share, end);
    const Sums sums = attend(Q.row(batch, head, row), K, V, extent, row, batch, head / group,
                             own_begin, own_end, scorer);
    if (lane == 0) shared.maximum[warp] = sums.maximum, shared.sum[warp] = sums.sum;
#pragma unroll
    for (int i = 0; i < Columns<dv>::count; ++i) {
      const int col = lane + i * warp_size;
      if (col < dv) shared.output[warp][col] = sums.output.x[i];
    }
    __syncthreads();  // all warps' sums are written
    write_row<cdiv(dv, threads)>(shared, extent, row, O.row(batch, head, row),
                                 lse.row(batch, head, row));
    __syncthreads();  // before the next row overwrites the sums
  }
}
