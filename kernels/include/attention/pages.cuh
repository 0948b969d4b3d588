#pragma once
// Paged keys and values: a tensor [pages, heads, page_size, columns], and a page table that lists
// the pages of each batch element.
//
// The host defines `page_size` above every kernel: a power of two, or 0 for contiguous keys. For
// paged keys struct Mods has
//   page_table_  the page table [batch, most]
//   page_count   the number of pages
// The table may not have been checked: page numbers out of range are clamped to the first or last
// page, and indices past the table's end to its last entry, so reads stay inside the arrays.

#include <tile/math.cuh>
#include <tile/tensor.cuh>

constexpr int page_rows = page_size > 0 ? page_size : 1;

struct Pages {
  const int* numbers;
  int most, count;

  // Returns the page number that the table lists for a row.
  __device__ __forceinline__ int listed(int row) const {
    return numbers[min(row / page_rows, most - 1)];
  }
  __device__ __forceinline__ bool has(int page) const { return page >= 0 && page < count; }
  __device__ __forceinline__ int page_of(int row) const {
    return max(0, min(listed(row), count - 1));
  }
};
