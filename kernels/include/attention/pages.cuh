#pragma once
// Keys and values that lie in pages: a tensor [pages, heads, page_size, columns], and for each
// batch element the numbers of its pages in a page table.
//
// The host writes above every kernel `page_size`, a power of two, or 0 where the rows of a batch
// element lie together. If there are pages, struct Mods has
//   page_table_  the page table [batch, most]
//   page_count   how many pages there are
// Nobody may have seen the table before. A number that no page has stands for the first or the last
// page, and so does one past the table's end, so that nothing outside is read.

#include <tile/math.cuh>
#include <tile/tensor.cuh>

constexpr bool paged = page_size > 0;
constexpr int page_rows = paged ? page_size : 1;

// The pages of one batch element.
struct Pages {
  const int* numbers;
  int most, count;

  // The number of the page with a row, as it stands in the table.
  __device__ __forceinline__ int listed(int row) const {
    return numbers[min(row / page_rows, most - 1)];
  }
  __device__ __forceinline__ bool has(int page) const { return page >= 0 && page < count; }
  __device__ __forceinline__ int page_of(int row) const {
    return max(0, min(listed(row), count - 1));
  }
};

template <class Table>
__device__ __forceinline__ Pages pages_of(const Table& table, int count, int batch) {
  return {table.data + batch * table.stride[0], table.size[1], count};
}

// Keys or values of all batch elements, with the interface of a Tensor.
template <class T, class Table>
struct PagedTensor {
  Tensor<T> tensor;  // its batch stride is that of pages
  Table table;
  int count;

  __device__ __forceinline__ Pages pages(int batch) const { return pages_of(table, count, batch); }
  __device__ __forceinline__ T* row(int batch, int head, int row) const {
    return tensor.row(pages(batch).page_of(row), head, row % page_rows);
  }
};

// Keys or values as rows of batch elements, in pages or not.
template <bool in_pages = paged, class T, class Arrays>
__device__ __forceinline__ auto rows_of(Tensor<T> tensor, [[maybe_unused]] const Arrays& mods) {
  if constexpr (in_pages)
    return PagedTensor<T, decltype(mods.page_table_)>{tensor, mods.page_table_, mods.page_count};
  else
    return tensor;
}
