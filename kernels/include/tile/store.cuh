#pragma once
// What the four lanes of a quad hold of a row: of each 8 columns lane l has a pair, columns
// 2 * (l % 4) and the next, as in the products of mma.cuh. Traded among the lanes, these become
// whole pieces of 16 bytes.

#include <tile/math.cuh>
#include <tile/warp.cuh>

// Pairs of columns 0 … 7 and 8 … 15 become four columns of one of them: even lanes get those of the
// first, odd lanes those of the second; lanes 0 and 1 columns 0 … 3, lanes 2 and 3 columns 4 … 7.
__device__ __forceinline__ uint2 trade_pairs(unsigned first, unsigned second, int lane) {
  const bool odd = lane % 2;
  const unsigned other = __shfl_xor_sync(full_warp, odd ? first : second, 1);
  return odd ? uint2{other, second} : uint2{first, other};
}

// The same for four times 8 columns: each lane gets all 8 of one, which is lane % 4 with its bits
// as trade_pairs has them: lane 0 the first, 1 the second, 2 the third, 3 the fourth.
__device__ __forceinline__ uint4 trade_quads(uint2 first, uint2 second, int lane) {
  const bool upper = lane % 4 / 2;
  const uint2 give = upper ? first : second, keep = upper ? second : first;
  const unsigned x = __shfl_xor_sync(full_warp, give.x, 2);
  const unsigned y = __shfl_xor_sync(full_warp, give.y, 2);
  return upper ? uint4{x, y, keep.x, keep.y} : uint4{keep.x, keep.y, x, y};
}

// Writes a row's 16-bit numbers from a column on, as far as there are `cols` columns, and those
// before column `end`, a multiple of 8. `aligned` says that rows begin at multiples of 16 bytes;
// all lanes call this, also for a row that is not inside.
template <int cols, int count>
__device__ __forceinline__ void store_row(scalar* row, const unsigned (&pairs)[count],
                                          int first_col, bool aligned, bool inside, int lane,
                                          int end = cols) {
  static_assert(count % 2 == 0, "eight columns twice at a time");
  if (cols % 8 == 0 && aligned) {
#pragma unroll
    for (int n = 0; n < count / 4 * 4; n += 4) {
      const uint2 first = trade_pairs(pairs[n], pairs[n + 1], lane);
      const uint2 second = trade_pairs(pairs[n + 2], pairs[n + 3], lane);
      const uint4 piece = trade_quads(first, second, lane);
      const int col = first_col + (n + lane % 4) * 8;
      if (inside && col < min(cols, end)) *reinterpret_cast<uint4*>(row + col) = piece;
    }
    if constexpr (count % 4 != 0) {
      const uint2 piece = trade_pairs(pairs[count - 2], pairs[count - 1], lane);
      const int col = first_col + (count - 2 + lane % 2) * 8;
      if (inside && col < min(cols, end))
        *reinterpret_cast<uint2*>(row + col + lane % 4 / 2 * 4) = piece;
    }
  } else {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int col = first_col + n * 8 + 2 * (lane % 4);
      const scalar* pair = reinterpret_cast<const scalar*>(&pairs[n]);
      if (inside && col < min(cols, end)) row[col] = pair[0];
      if (inside && col + 1 < min(cols, end)) row[col + 1] = pair[1];
    }
  }
}
