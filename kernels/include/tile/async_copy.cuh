#pragma once
// Tiles of swizzled 16-byte chunks (swizzle.cuh), and asynchronous copies of a head's rows to them.

#include <ptx/cp_async.cuh>
#include <ptx/pack.cuh>
#include <tile/share_out_rows.cuh>
#include <tile/swizzle.cuh>
#include <tile/tensor.cuh>

constexpr int in_chunk = 16 / sizeof(operand);  // operands per chunk

// Returns the position of a float32 row. Some products read every second row, two chunks of four
// rows at a time. If the width is an odd multiple of 4 chunks, these rows would all fall into the
// same half of the banks, so the third and fourth of every four rows swap places.
template <int chunks>
__device__ __forceinline__ int paired(int row) {
  static_assert(chunks % 4 == 0, "rows are made of 64 bytes");
  return chunks % 8 == 0 ? row : row ^ (row / 2 & 1);
}

// Returns a chunk's address. Eight lanes that load doubles read 4 chunks in each of 2 rows, or 2
// chunks in each of 4 even rows.
template <int height, int columns>
__device__ __forceinline__ operand* at(operand (&tile)[height][columns], int row, int chunk) {
  if constexpr (sizeof(operand) == 4) row = paired<columns / in_chunk>(row);
  const int line = sizeof(operand) == 8 ? (row & 6) ^ row % 2 * 4 : row;
  return &tile[row][swizzled<columns / in_chunk>(line, chunk) * in_chunk];
}

// Returns the address `below` rows down. `below` is a multiple of 8, the period of the swizzle.
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

  // Returns a row of a tile in which the rows of `heads` heads alternate.
  template <int heads>
  __device__ __forceinline__ const operand* row(int row) const {
    return data + row / heads * stride + (heads > 1 ? row % heads * head_stride : 0);
  }
};

// Starts copying `width` columns of a head's rows in chunks of 16 bytes, with zeros beyond its rows
// and its `cols` columns. Unaligned rows are copied synchronously, one element at a time.
template <int threads, int width, bool whole, int heads = 1, int height, int columns>
__device__ __forceinline__ void copy_tile(operand (&tile)[height][columns], const Head& head,
                                          int first_row, int first_col, int cols) {
  constexpr int chunks = width / in_chunk;
  if (head.aligned) {
    const operand* from = nullptr;
    int left = 0;  // rows of the head below the thread's first row
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

// Starts copying all `cols` columns of a head's rows, padded with zeros to a multiple of `step`.
template <int threads, int cols, int heads = 1, int height, int columns>
__device__ __forceinline__ void copy_rows(operand (&tile)[height][columns], const Head& head,
                                          int first_row) {
  constexpr int width = cdiv(cols, step) * step;
  copy_tile<threads, width, cols == width, heads>(tile, head, first_row, 0, cols);
}
