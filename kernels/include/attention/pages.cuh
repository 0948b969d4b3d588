#pragma once
// Keys and values that lie in pages: a tensor [pages, heads, page_size, columns], and for each
// batch element the numbers of its pages in a page table.
//
// The host writes above every kernel `page_size`, a power of two, or 0 where the rows of a batch
// element lie together. If there are pages, struct Mods has
//   page_table_  the page table [batch, most]
//   page_count   how many pages there are
// The table may not have been checked: page numbers out of range are clamped to the first or last
// page, and indices past the table's end to its last entry, so nothing outside is read.

#include <tile/math.cuh>
#include <tile/tensor.cuh>

constexpr int page_rows = page_size > 0 ? page_size : 1;

// The pages of one batch element.
struct Pages {
  const int* numbers;
  int most, count;

  // The number of the page with a row, as the table lists it.
  __device__ __forceinline__ int listed(int row) const {
    return numbers[min(row / page_rows, most - 1)];
  }
  __device__ __forceinline__ bool has(int page) const { return page >= 0 && page < count; }
  __device__ __forceinline__ int page_of(int row) const {
    return max(0, min(listed(row), count - 1));
  }
};
