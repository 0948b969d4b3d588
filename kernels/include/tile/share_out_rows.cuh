#pragma once
// Distributes the elements of a tile by rows over the threads of a block.

#include <tile/math.cuh>

// Returns the least power of two that is at least `least`.
__host__ __device__ constexpr int power_of_two(int least) {
  return least <= 1 ? 1 : 2 * power_of_two(cdiv(least, 2));
}

// The distance between two consecutive rows of a thread.
template <int threads, int width>
constexpr int rows_in_round = threads / power_of_two(width);

// Calls body(row, col, round) for rows 0 … height - 1 and columns 0 … width - 1, each in one
// thread. A thread stays in its column, so its addresses advance by a constant.
template <int threads, int height, int width, class Body>
__device__ __forceinline__ void share_out_rows(Body body) {
  constexpr int columns = power_of_two(width), rows = rows_in_round<threads, width>;
  static_assert(rows > 0, "a block has a thread for each column");
  constexpr bool whole_rounds = threads % columns == 0 && height % rows == 0;
  const int first = threadIdx.x / columns, col = threadIdx.x % columns;
#pragma unroll
  for (int round = 0; round < cdiv(height, rows); ++round) {
    const int row = first + round * rows;
    if ((whole_rounds || (first < rows && row < height)) && (columns == width || col < width))
      body(row, col, round);
  }
}
