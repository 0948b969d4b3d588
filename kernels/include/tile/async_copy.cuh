#pragma once
// Tiles of 16-byte chunks, swizzled as in swizzle.cuh, and asynchronous copies of a head's rows
// into them.

#include <ptx/cp_async.cuh>
#include <ptx/pack.cuh>
#include <tile/share_out_rows.cuh>
#include <tile/swizzle.cuh>
#include <tile/tensor.cuh>

constexpr int in_chunk = 16 / sizeof(operand);  // elements

// The position of a row of float32. Products also read every second row, two chunks of four rows
// together. Where the width is an odd multiple of 4 chunks, such rows would all lie in the same
// half of the banks: there the third and the fourth of four rows are swapped.
template <int chunks>
__device__ __forceinline__ int paired(int row) {
  static_assert(chunks % 4 == 0, "rows are made of 64 bytes");
  return chunks % 8 == 0 ? row : row ^ (row / 2 & 1);
}

// The address of a chunk. Of doubles, eight lanes read 4 chunks of 2 rows, or 2 of 4 even rows.
template <int height, int columns>
__device__ __forceinline__ operand* at(operand (&tile)[height][columns], int row, int chunk) {
  if constexpr (sizeof(operand) == 4) row = paired<columns / in_chunk>(row);
  const int line = sizeof(operand) == 8 ? (row & 6) ^ row % 2 * 4 : row;
  return &tile[row][swizzled<columns / in_chunk>(line, chunk) * in_chunk];
}

// The address `below` rows further on, a multiple of 8: the swizzle repeats, so one serves all.
template <int height, int columns>
__device__ __forceinline__ operand* at(operand (&tile)[height][columns], int row, int chunk,
                                       int below) {
  return at(tile, row, chunk) + below * columns;
}

// The rows of one head in global memory.
struct Head {
  const operand* data;
  long long stride, head_stride;
  int rows;
  bool aligned;

  __device__ Head(Tensor<const operand> tensor, int batch, int head, int rows)
      : data(tensor.row(batch, head, 0)),
        stride(tensor.row_stride),
        head_stride(tensor.head_stride),
        rows(rows),
        aligned(is_aligned(tensor)) {}

  // A row of a tile in which the rows of `heads` heads alternate.
  template <int heads>
  __device__ __forceinline__ const operand* row(int row) const {
    return data + row / heads * stride + (heads > 1 ? row % heads * head_stride : 0);
  }
};

// Begins to copy `width` columns of a head's rows, 16 bytes at a time, and writes zeros beyond its
// rows and its `cols` columns. Rows that are not aligned are copied at once, one element at a time.
template <int threads, int width, bool whole, int heads = 1, int height, int columns>
__device__ __forceinline__ void copy_tile(operand (&tile)[height][columns], const Head& head,
                                          int first_row, int first_col, int cols) {
  constexpr int chunks = width / in_chunk;
  if (head.aligned) {
    const operand* from = nullptr;
    int left = 0;  // rows of the head from the thread's first row on
    share_out_rows<threads, height, chunks>([&](int row, int chunk, int round) {
      const int count = whole ? in_chunk : max(0, min(in_chunk, cols - chunk * in_chunk));
      const int below = round * rows_in_round<threads, chunks>;
      if (round == 0) left = head.rows - first_row - row;
      if (round == 0 || heads > 1)
        from = head.row<heads>(first_row + row) + first_col + chunk * in_chunk;
      else
        from += rows_in_round<threads, chunks> * head.stride;
      cp_async(at(tile, row, chunk), from, below < left ? count * int(sizeof(operand)) : 0);
    });
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < height * width; i += threads) {
      const int row = i / width, col = i % width;
      const bool inside = first_row + row < head.rows && col < cols;
      at(tile, row, col / in_chunk)[col % in_chunk] =
          inside ? head.row<heads>(first_row + row)[first_col + col] : operand(0.0f);
    }
  }
}

// Begins to copy all `cols` columns of rows of a head, padded with zeros to whole products.
template <int threads, int cols, int heads = 1, int height, int columns>
__device__ __forceinline__ void copy_rows(operand (&tile)[height][columns], const Head& head,
                                          int first_row) {
  constexpr int width = cdiv(cols, step) * step;
  copy_tile<threads, width, cols == width, heads>(tile, head, first_row, 0, cols);
}
