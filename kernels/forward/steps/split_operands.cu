// split_operands: splits Q, K and V into high and low parts in float16.
//
// A float32 has 24 bits of mantissa, of which two float16 numbers hold 22 to 23. Scaling by powers
// of two brings numbers into the range of float16. `split_maxima` finds the power of each column of
// K and V. Elements of Q are first multiplied by the powers of K's columns, then each row of Q is
// scaled by its own power. Let e[j] be the exponent of the largest number in column j, and r[i]
// that of row i (see split_pair.cuh):
//
//   K[k][j] * 2^(14 - e[j])                       = K_high + K_low / 2^11
//   V[k][j] * 2^(14 - e[j])                       = V_high + V_low / 2^11
//   Q[i][j] * 2^(e[j]) * 2^(14 - r[i]) * sign     = Q_high + Q_low / 2^11
//   scale2[i] = |scale| * log2(e) * 2^(r[i] - 28) * (1 + mean_cut)
//
// A split product of Q and K times scale2 is a score, as an exponent of two; sign is the sign of
// scale. With score_mod, sign is 1 and scale2 = 2^(r[i] - 28) * (1 + mean_cut), so that the product
// is q·k. NaN and infinity become 0. The flag of a row is 1 if its split is not accurate:
//  - the row, or K or V of its head, contains NaN or infinity;
//  - scores are so large that the split error of the row's largest number would be noticeable.
// All other flags are set to 0, so the array need not be cleared before. small_values counts the
// small numbers in each column of V and block of rows (cancellation.cuh); see also column_bits.cuh.
//
//   Q [batch, heads, M, d]    K, V [batch, kv_heads, N, d | dv]    maxima: see split_maxima
//   Q_high, Q_low [batch, heads, M, d], K_high, K_low, V_high, V_low [batch, kv_heads, N, d | dv]:
//   contiguous, columns padded with zeros to a multiple of 16
//   V_exponents [batch, kv_heads, dv]    scale2, flags [batch, heads, M]
//   with packed rows (batch.cuh) the arrays [batch, kv_heads, …] have one element per sequence
//   grid (query_blocks for tiles of Q, then blocks for tiles of K and V)    block (threads)
//   the host sets: scalar, operand, real, slabs, rows_of_block, sets_bits (false if only the
//   output is computed), d, dv, threads, shared_bytes and options (extent.cuh)
#include <attention/score.cuh>
#include <attention/tile_index.cuh>
#include <forward/parts/split_f32/cancellation.cuh>
#include <forward/parts/split_f32/split_row.cuh>
#include <ptx/resident_threads.cuh>
#include <tile/block_copy.cuh>
#include <tile/shared.cuh>

struct Shared {
  int exponents[d + dv];                      // column exponents of K, then of V
  unsigned small[cdiv(dv, step) * step / 2];  // two 16-bit counters of small values, one per column
  unsigned bits[warp_size];                   // of columns of K (column_bits.cuh)
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(operand) == 2, "two 16-bit parts share a register");
static_assert(rows_of_block < 256, "counts of small values fit into a byte");
constexpr float largest_score = 0x1p22f;  // largest score that a row's largest numbers may cause
constexpr int resident = resident_threads / threads;  // blocks per multiprocessor

// Splits rows of K or V. Calls see(pair, x, y) for every scaled pair of neighbouring numbers.
template <int cols, class See>
__device__ void split_rows(Tensor<const scalar> from, Tensor<operand> high, Tensor<operand> low,
                           int batch, int head, int first_row, int end, const int* exponents,
                           See see) {
  constexpr int pairs = cdiv(cols, step) * step / 2;
  share_out<threads, rows_of_block * pairs, 4>([&](int i, int) {
    const int row = first_row + i / pairs, col = i % pairs * 2;
    if (row >= end) return;
    const scalar* x = from.row(batch, head, row) + col;
    const auto at = [&](int j) {
      if (col + j >= cols || !is_finite(x[j])) return 0.0f;
      return times_two_to(x[j], split_exponent - exponents[col + j]);
    };
    const float pair[2] = {at(0), at(1)};
    see(i % pairs, pair[0], pair[1]);
    unsigned high_pair, low_pair;
    split_pair<operand>(pair[0], pair[1], high_pair, low_pair);
    *reinterpret_cast<unsigned*>(high.row(batch, head, row) + col) = high_pair;
    *reinterpret_cast<unsigned*>(low.row(batch, head, row) + col) = low_pair;
  });
}

// Returns the factor that turns split products into scores, corrected for truncation. It is above
// 0, since 0 times the -infinity of a masked score would be NaN.
__device__ __forceinline__ float unit_of(int exponent, float scale) {
  const float factor = has_score_mod ? 1.0f : fabs(scale) * log2e;
  const float whole = fmaf(factor, mean_cut(d), factor);
  const float unit = times_two_to(whole, exponent - 2 * split_exponent);
  return fmin(fmax(unit, 0x1p-126f), 0x1.fffffep127f);
}

extern "C" __global__ __launch_bounds__(threads, resident) void split_operands(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, const float* maxima,
    Tensor<operand> Q_high, Tensor<operand> Q_low, Tensor<operand> K_high, Tensor<operand> K_low,
    Tensor<operand> V_high, Tensor<operand> V_low, int* V_exponents, Tensor<real> scale2,
    Tensor<unsigned char> flags, unsigned char* small_values, unsigned* column_bits, Sizes sizes,
    int query_blocks, int heads, int kv_heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  constexpr long long table = slabs * (d + dv + 1);
  const int lane = threadIdx.x % warp_size, index = blockIdx.x;
  if (index < query_blocks) {
    const auto [tile, head, batch] = place_of_rows<rows_of_block>(index, sizes, mods, heads);
    const int M = extent_of(sizes, mods, batch).M, first = tile * rows_of_block;
    if (first < 0 || first >= M) return;
    const int kv_head = batch * kv_heads + head / group;
    const bool special = read_exponents<threads, slabs>(maxima + kv_head * table, shared.exponents);
    const float sign = has_score_mod ? 1.0f : float((scale > 0) - (scale < 0));
    const int end = min(first + rows_of_block, M);
    unsigned bits = 0;
    for (int row = first + threadIdx.x / warp_size; row < end; row += threads / warp_size) {
      const SplitRow<d> q(Q.row(batch, head, row), shared.exponents, lane);
      bits |= q.split<operand>(Q_high.row(batch, head, row), Q_low.row(batch, head, row),
                               shared.exponents, sign, lane);
      if (sets_bits && row + threads / warp_size >= end)  // after the loop ptxas would spill
        atomicOr(column_words(column_bits, kv_head, group, 1 + head % group * 2) + lane, bits);
      if (lane > 0) continue;
      *scale2.row(batch, head, row) = unit_of(q.exponent, scale);
      const bool too_large = !(times_two_to(fabs(scale), q.exponent) <= largest_score);
      *flags.row(batch, head, row) = special || !q.finite || too_large;
    }
  } else {
    const auto [tile, head, batch] =
        place_of_keys<rows_of_block>(index - query_blocks, sizes, mods, kv_heads);
    const int N = extent_of(sizes, mods, batch).N, first = tile * rows_of_block;
    if (first < 0 || (first >= N && first > 0)) return;
    const long long kv_head = (long long)batch * kv_heads + head;
    read_exponents<threads, slabs>(maxima + kv_head * table, shared.exponents);
    if (tile == 0)
      for (int col = threadIdx.x; col < dv; col += threads)
        V_exponents[kv_head * dv + col] = shared.exponents[d + col];
    for (int i = threadIdx.x; i < cdiv(dv, step) * step / 2; i += threads) shared.small[i] = 0;
    if (threadIdx.x < warp_size) shared.bits[lane] = 0;
    __syncthreads();  // the counters are 0 before counting starts
    split_rows<d>(K, K_high, K_low, batch, head, first, N, shared.exponents,
                  [&](int pair, float x, float y) {
                    const unsigned bits = bits_of(x, x) | bits_of(y, y) << 1;
                    if (sets_bits)
                      atomicOr(&shared.bits[pair % warp_size], bits << pair / warp_size * 2);
                  });
    const float least = small_value(N);
    split_rows<dv>(V, V_high, V_low, batch, head, first, N, shared.exponents + d,
                   [&](int pair, float x, float y) {
                     const unsigned small = (fabs(x) < least) + ((fabs(y) < least) << 16);
                     if (counts_values && small > 0) atomicAdd(&shared.small[pair], small);
                   });
    __syncthreads();  // all small values are counted, and all bits set
    if (sets_bits && threadIdx.x < warp_size)
      atomicOr(column_words(column_bits, kv_head, group, 0) + lane, shared.bits[lane]);
    if constexpr (!counts_values) return;
    const long long place = kv_head * max(cdiv(N, rows_of_block), 1) + tile;
    for (int col = threadIdx.x; col < dv; col += threads)
      small_values[place * dv + col] = shared.small[col / 2] >> 16 * (col % 2);
  }
}
