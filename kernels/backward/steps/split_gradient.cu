// split_gradient: splits dO into high and low halves in float16, computes delta, and flags rows
// whose split gradients would not be accurate.
//
// dO is split with the exponents of V's columns, as split_operands splits Q with those of K. With
// e[j] the exponent of V's column j and g[i] the exponent of dO's row i:
//
//   dO[i][j] * 2^(e[j]) * 2^(14 - g[i]) = dO_high + dO_low / 2^11     dO_units[i] = 2^(g[i] + 32)
//   delta[i] = sum of dO[i][j] * O[i][j] over j, less the gradient of lse
//
// The split product of dO and V times dO_units is dP * 2^60. split_operands has already written
// scale2 and flags. This kernel also flags rows
//  - in which an element of dO or delta is NaN or infinite;
//  - whose dO or Q is so large or so small that weights times its power of two leave float32 range;
//  - whose rowsum(|dO * O|) is below 2^-22 * 2^(g[i]): their dP is too small for the low halves.
// The last blocks of the grid write the exponents of K's columns, by which dQ and dK are scaled.
//
//   Q, O, dO [batch, heads, M, d | dv]    maxima: see split_maxima
//   dO_high, dO_low [batch, heads, M, dv]: contiguous, padded with zeros to a multiple of 16
//   column_bits: see column_bits.cuh
//   K_exponents [batch, kv_heads, d]    scale2, dO_units, delta, flags [batch, heads, M]
//   grid (query_blocks for row tiles, then kv_heads * batch)    block (threads)
//   the host sets: scalar, result, operand, real, slabs, rows_of_block, d, dv, threads,
//   shared_bytes, has_dlse and options (extent.cuh)
#include <attention/score.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/gradient_of_lse.cuh>
#include <backward/parts/split_f32/split_exponents.cuh>
#include <forward/parts/split_f32/split_row.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

struct Shared {
  int exponents[d + dv];  // column exponents of K, then of V
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

// Computes rowsum(dO * O) and rowsum(|dO * O|) in all lanes.
struct RowProduct {
  real sum = 0, size = 0;

  __device__ __forceinline__ RowProduct(const result* output, const scalar* gradient, int lane) {
    for (int col = lane; col < dv; col += warp_size) {
      const real product = real(output[col]) * real(gradient[col]);
      sum += product;
      size += fabs(product);
    }
    sum = warp_sum(sum);
    size = warp_sum(size);
  }
};

// Returns whether a nonzero row of dO has weights in float32 range and an accurate dP.
__device__ __forceinline__ bool is_held(const SplitRow<dv>& row, const RowProduct& product) {
  return least_row <= row.exponent && row.exponent <= largest_row &&
         product.size >= times_two_to(0x1p-22f, row.exponent);
}

// Returns whether a nonzero row of Q has weights that are too small, judged by the row's unit.
__device__ __forceinline__ bool is_small(const scalar* q, real unit, real scale, int lane) {
  if (unit >= least_unit || (scale == 0 && !has_score_mod)) return false;
  bool zeros = true;
  for (int col = lane; col < d; col += warp_size) zeros &= q[col] == 0;
  return !__all_sync(full_warp, zeros);
}

extern "C" __global__ __launch_bounds__(threads) void split_gradient(
    Tensor<const scalar> Q, Tensor<const result> O, Tensor<const scalar> dO, const float* maxima,
    Tensor<operand> dO_high, Tensor<operand> dO_low, unsigned* column_bits, int* K_exponents,
    Tensor<const real> scale2, Tensor<real> dO_units, Tensor<real> delta,
    Tensor<unsigned char> flags, Sizes sizes, int query_blocks, int heads, int kv_heads, int group,
    real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  constexpr int table = slabs * (d + dv + 1);
  const int lane = threadIdx.x % warp_size, index = blockIdx.x;
  if (index >= query_blocks) {
    const long long kv_head = index - query_blocks;
    read_exponents<threads, slabs>(maxima + kv_head * table, shared.exponents);
    for (int col = threadIdx.x; col < d; col += threads)
      K_exponents[kv_head * d + col] = shared.exponents[col];
    return;
  }
  const auto [tile, head, batch] = place_of_rows<rows_of_block>(index, sizes, mods, heads);
  const int M = extent_of(sizes, mods, batch).M, first = tile * rows_of_block;
  if (first < 0 || first >= M) return;
  const long long kv_head = (long long)batch * kv_heads + head / group;
  read_exponents<threads, slabs>(maxima + kv_head * table, shared.exponents);
  unsigned bits = 0;
  const int* exponents = shared.exponents + d;  // column exponents of V
  for (int row = first + threadIdx.x / warp_size; row < min(first + rows_of_block, M);
       row += threads / warp_size) {
    const scalar* gradient = dO.row(batch, head, row);
    const SplitRow<dv> own(gradient, exponents, lane);
    bits |= own.split<operand>(dO_high.row(batch, head, row), dO_low.row(batch, head, row),
                               exponents, 1.0f, lane);
    const RowProduct product(O.row(batch, head, row), gradient, lane);
    const bool small =
        is_small(Q.row(batch, head, row), *scale2.row(batch, head, row), scale, lane);
    const bool held = own.is_zero() || is_held(own, product);
    if (lane > 0) continue;
    const int packed_row = (packed ? delta.first_rows()[batch] : 0) + row;
    const real D = product.sum - gradient_of_lse(mods, packed ? 0 : batch, head, packed_row);
    *delta.row(batch, head, row) = D;
    *dO_units.row(batch, head, row) = two_to(min(max(own.exponent + unit_exponent, -126), 127));
    if (!own.finite || !held || small || !(fabs(D) < largest_delta))
      *flags.row(batch, head, row) = 1;
  }
  atomicOr(column_words(column_bits, kv_head, group, 2 + head % group * 2) + lane, bits);
}
