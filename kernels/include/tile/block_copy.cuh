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

// The least power of two that is not below a number.
__host__ __device__ constexpr int power_of_two(int least) {
  return least <= 1 ? 1 : 2 * power_of_two(cdiv(least, 2));
}

// Calls body(row, col, turn) for rows 0 … height - 1 and cols 0 … width - 1 of a tile, each in one
// thread. A thread keeps its column and goes down by `rows_in_turn<width>` rows from turn to turn,
// so that its addresses advance by a constant.
template <int width>
constexpr int rows_in_turn = threads / power_of_two(width);

template <int height, int width, class Body>
__device__ __forceinline__ void share_out_rows(Body body) {
  static_assert(rows_in_turn<width> > 0, "a block has a thread for each column");
  constexpr bool whole_rows = power_of_two(width) == width;
  constexpr bool whole_turns =
      threads % power_of_two(width) == 0 && height % rows_in_turn<width> == 0;
  const int first = threadIdx.x / power_of_two(width), col = threadIdx.x % power_of_two(width);
#pragma unroll
  for (int turn = 0; turn < cdiv(height, rows_in_turn<width>); ++turn) {
    const int row = first + turn * rows_in_turn<width>;
    if ((whole_turns || (first < rows_in_turn<width> && row < height)) &&
        (whole_rows || col < width)) {
      body(row, col, turn);
    }
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
