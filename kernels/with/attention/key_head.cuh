#pragma once
// Asynchronous copies of paged keys and values into the tiles of async_copy.cuh.

#include <attention/batch.cuh>
#include <ptx/cp_async.cuh>
#include <tile/async_copy.cuh>
#include <tile/share_out_rows.cuh>

struct PagedHead {
  const operand* data;  // start of page 0
  long long stride, page_stride;
  Pages pages;
  int rows;
  bool aligned;

  template <class Arrays>
  __device__ PagedHead(Tensor<const operand> keys, const Arrays& mods, int batch, int head,
                       int rows)
      : data(keys.row(0, head, 0)),
        stride(keys.row_stride),
        page_stride(keys.batch_stride),
        pages(rows_of<true>(keys, mods).pages(batch)),
        rows(rows),
        aligned(is_aligned(keys)) {}

  __device__ __forceinline__ const operand* row(int row) const {
    return data + pages.page_of(row) * page_stride + row % page_rows * stride;
  }
};

// Starts copying all `cols` columns of a head's rows, like copy_rows() for a Head. The first row is
// a multiple of the tile's height, so a thread reads the page table once per page.
template <int threads, int cols, int height, int columns>
__device__ __forceinline__ void copy_rows(operand (&tile)[height][columns], const PagedHead& head,
                                          int first_row) {
  constexpr int width = cdiv(cols, step) * step, chunks = width / in_chunk;
  constexpr int distance = rows_in_round<threads, chunks>;  // between two rows of a thread
  constexpr bool in_step = page_rows % height == 0 || height % page_rows == 0;
  constexpr bool keeps_pages = in_step && page_rows % distance == 0;
  if (head.aligned) {
    const operand* from = nullptr;
    share_out_rows<threads, height, chunks>([&](int row, int chunk, int round) {
      const int count = cols == width ? in_chunk : max(0, min(in_chunk, cols - chunk * in_chunk));
      if (round == 0 || !keeps_pages || round * distance % page_rows == 0)
        from = head.row(first_row + row) + chunk * in_chunk;
      else
        from += distance * head.stride;
      const bool inside = first_row + row < head.rows;
      cp_async(at(tile, row, chunk), from, inside ? count * int(sizeof(operand)) : 0);
    });
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < height * width; i += threads) {
      const int row = i / width, col = i % width;
      const bool inside = first_row + row < head.rows && col < cols;
      at(tile, row, col / in_chunk)[col % in_chunk] =
          inside ? head.row(first_row + row)[col] : operand(0.0f);
    }
  }
}

// The head from which a kernel copies keys or values, paged or not.
template <bool in_pages>
struct KeyHeadOf : Head {
  template <class Arrays>
  __device__ KeyHeadOf(Tensor<const operand> keys, const Arrays&, int batch, int head, int rows)
      : Head(keys, batch, head, rows) {}
};
template <>
struct KeyHeadOf<true> : PagedHead {
  using PagedHead::PagedHead;
};
using KeyHead = KeyHeadOf<(page_size > 0)>;
