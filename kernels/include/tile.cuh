#pragma once
// Copies of tiles from global into shared memory by the whole block.

#include <tensor.cuh>

// Neighbouring threads read neighbouring columns, so that a warp reads whole cache lines. Rows past
// `rows` are filled with zeros: they take part in sums, and leftovers there could be NaN.
template <int height, int width, int stride>
__device__ __forceinline__ void load_tile(scalar (&tile)[height][stride],
                                          Tensor<const scalar> tensor, int batch, int head,
                                          int first_row, int rows) {
  static_assert(width <= stride, "a row of the tile must hold a row of the tensor");
  for (int i = threadIdx.x; i < height * width; i += threads) {
    const int row = i / width, col = i % width;
    tile[row][col] =
        first_row + row < rows ? tensor.row(batch, head, first_row + row)[col] : scalar(real(0));
  }
}
