#pragma once
// Distributes work over the threads of a block, and copies tiles to shared memory.

#include <tile/math.cuh>
#include <timeline.cuh>

// Calls body(i, round) for i = 0 … count - 1, each in one thread; neighbouring threads receive
// neighbouring i. Up to `together` rounds are unrolled, so that all of their loads are in flight
// before the first value is needed.
template <int threads, int count, int together, class Body>
__device__ __forceinline__ void share_out(Body body) {
#pragma unroll together
  for (int round = 0; round < cdiv(count, threads); ++round) {
    const int i = round * threads + threadIdx.x;
    if (count % threads == 0 || i < count) body(i, round);
  }
}

// Copies `width` columns of a head's rows, coalesced, from a Tensor or a PagedTensor. Fills rows
// from `rows` on with zeros, because a NaN left there would spoil sums.
template <int threads, int width, int height, int stride, class Rows>
__device__ __forceinline__ void load_tile(scalar (&tile)[height][stride], Rows tensor, int batch,
                                          int head, int first_row, int rows) {
  static_assert(width <= stride, "a row of the tile must hold a row of the tensor");
  const timeline::Phase phase(timeline::loads);
  share_out<threads, height * width, 16>([&](int i, int) {
    const int row = i / width, col = i % width;
    tile[row][col] =
        first_row + row < rows ? tensor.row(batch, head, first_row + row)[col] : scalar(real(0));
  });
}
