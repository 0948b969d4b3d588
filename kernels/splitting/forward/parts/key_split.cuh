#pragma once
// Which keys of a tile of Q a block reads: one of several splits, whose results merge_splits
// merges. A single split is stored by the kernel itself.
//
//   O [batch, heads, M, count, dv rounded up to a multiple of 16], before normalization
//   maxima [batch, heads, M, count, stored_maxima]
//   row_sums [batch, heads, M, count], relative to the maxima

#include <attention/row_state.cuh>
#include <tile/math.cuh>
#include <timeline.cuh>

class KeySplits {
  float *O, *maxima, *row_sums;
  int number;

 public:
  __device__ __forceinline__ KeySplits(float* O, float* maxima, float* row_sums, int count)
      : O(O), maxima(maxima), row_sums(row_sums), number(count) {}
  __device__ __forceinline__ int count() const { return number; }

  // Restricts a tile of Q to the keys of one split, which begins at a tile of Bc keys.
  template <class Tile>
  __device__ __forceinline__ void take(Tile& tile, int split) const {
    const long long tiles = cdiv(max(0, tile.kv_end - tile.kv_begin), Bc);
    const int first = tile.kv_begin;
    tile.kv_begin = first + int(split * tiles / number) * Bc;
    tile.kv_end = min(tile.kv_end, first + int((split + 1) * tiles / number) * Bc);
  }

  // Stores a warp's rows of this split, and columns from `first_col` on. Returns false, and stores
  // nothing, if there is only one split. `stored` counts the rows of a head in the arrays.
  template <int dv, int blocks, int pack_gqa>
  __device__ __forceinline__ bool store(const float (&sums)[1][blocks][4],
                                        const Rows<step, pack_gqa>& rows, int split,
                                        long long first_head, int stored, int lane,
                                        int first_col) const {
    constexpr int width = cdiv(dv, step) * step;
    if (number == 1) return false;
    const timeline::Phase phase(timeline::epilogue);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows.sum[0][half];
      sum += __shfl_xor_sync(full_warp, sum, 1);
      sum += __shfl_xor_sync(full_warp, sum, 2);
      const int row = rows.row(0, half), query = row / pack_gqa;
      if (query >= rows.extent.M) continue;
      const long long at = ((first_head + row % pack_gqa) * stored + query) * number + split;
      if (first_col == 0 && lane % 4 == 0) {
        maxima[at * stored_maxima] = rows.maximum[0][half];
        if constexpr (has_row_max) maxima[at * stored_maxima + 1] = rows.row_max(half);
        row_sums[at] = sum;
      }
#pragma unroll
      for (int i = 0; i < blocks; ++i) {
        const int col = first_col + i * 8 + 2 * (lane % 4);
        const float (&x)[4] = sums[0][i];
        if (col < width)
          *reinterpret_cast<float2*>(O + at * width + col) = {x[2 * half], x[2 * half + 1]};
      }
    }
    return true;
  }
};
