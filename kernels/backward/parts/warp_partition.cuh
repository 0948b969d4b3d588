#pragma once
// Divides a tensor-core product among the warps of a block.

#include <ptx/opaque.cuh>
#include <ptx/pack.cuh>
#include <tile/math.cuh>
#include <tile/warp.cuh>

// Returns the number of row slices of a product; the warps of a slice divide its columns. The shape
// with the shortest edges reads the least shared memory.
__host__ __device__ constexpr int parts_of_rows(int height, int columns, int warps) {
  int best = 1, least = 1 << 30;
  for (int parts = 1; parts <= warps; parts *= 2) {
    if (warps % parts != 0 || height % (parts * step) != 0) continue;
    const int size = height / parts + cdiv(columns, warps / parts * step) * step;
    if (size <= least) {
      best = parts;
      least = size;
    }
  }
  return best;
}

// A warp's part of a product: `rows` x `cols` elements starting at (row, col).
template <int height, int columns, int warps>
struct WarpPartition {
  static constexpr int down = parts_of_rows(height, columns, warps);
  static constexpr int across = warps / down;
  static constexpr int rows = height / down;
  static constexpr int cols = cdiv(columns, across* step) * step;
  static constexpr bool whole = cols * across == columns;  // else some columns lie past the end
  using Sums = real[rows / step][cols / 8][4];
  static constexpr int fours = rows / step * (cols / 8);

  int row, col, end = columns;

  __device__ __forceinline__ WarpPartition() {
    const int warp = opaque(int(threadIdx.x)) / warp_size;
    row = warp % down * rows;
    col = warp / down * cols;
  }
  __device__ __forceinline__ bool has(int n) const { return whole || col + n * step < end; }
};
