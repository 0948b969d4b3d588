#pragma once
// Work that the whole block shares out, and copies of tiles into shared memory made with it.

#include <tile/math.cuh>
#include <tile/tensor.cuh>

// Calls body(i, turn) for i = 0 … count - 1, each in one thread, neighbours in neighbouring
// threads. The number of turns is a constant, so that up to `together` of them unroll: their loads
// are then all on the way before the first one's value is needed.
template <int count, int together, class Body>
__device__ __forceinline__ void share_out(Body body) {
#pragma unroll together
  for (int turn = 0; turn < cdiv(count, threads); ++turn) {
    const int i = turn * threads + threadIdx.x;
    if (count % threads == 0 || i < count) body(i, turn);
  }
}

// Copies rows of a tensor, whole cache lines at a time. Rows past `rows` are filled with zeros:
// they take part in sums, and leftovers there could be NaN.
template <int height, int width, int stride>
__device__ __forceinline__ void load_tile(scalar (&tile)[height][stride],
                                          Tensor<const scalar> tensor, int batch, int head,
                                          int first_row, int rows) {
  static_assert(width <= stride, "a row of the tile must hold a row of the tensor");
  share_out<height * width, 16>([&](int i, int) {
    const int row = i / width, col = i % width;
    tile[row][col] =
        first_row + row < rows ? tensor.row(batch, head, first_row + row)[col] : scalar(real(0));
  });
}
