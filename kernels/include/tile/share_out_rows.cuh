#pragma once
// The rows and columns of a tile, shared out among the threads of a block.

#include <tile/math.cuh>

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
