#pragma once
// The rows of one key head, in pages or not, from which TMA copies tiles of keys or values.

#include <attention/batch.cuh>
#include <tile/tma_tile.cuh>

template <bool in_pages>
struct KeyBoxesOf {
  const TensorMap& map;
  int head, batch;

  template <class Task>
  __device__ __forceinline__ KeyBoxesOf(const TensorMap& map, const Mods&, const Task& task,
                                        int head)
      : map(map), head(head), batch(task.batch) {}

  // Starts copying a tile from a row and column on.
  template <int rows, int columns>
  __device__ __forceinline__ void load(TmaTile<operand, rows, columns>& to, Barrier& full, int row,
                                       int column) const {
#pragma unroll
    for (int i = 0; i < to.count; ++i)
      tma_load(to.box[i], map, full, column + i * to.in_row, row, head, batch);
  }
};

// Boxes have at most the rows of a page, and the page's number is their batch coordinate. The page
// table need not list pages beyond the keys that the task reads; TMA fills these boxes with zeros.
template <>
struct KeyBoxesOf<true> {
  const TensorMap& map;
  Pages pages;
  int head, end;

  template <class Arrays, class Task>
  __device__ __forceinline__ KeyBoxesOf(const TensorMap& map, const Arrays& mods, const Task& task,
                                        int head)
      : map(map),
        pages(pages_of(mods.page_table_, mods.page_count, task.batch)),
        head(head),
        end(task.kv_end) {}

  template <int rows, int columns>
  __device__ __forceinline__ void load(TmaTile<operand, rows, columns>& to, Barrier& full, int row,
                                       int column) const {
    constexpr int box_rows = rows < page_rows ? rows : page_rows;
    static_assert(rows % box_rows == 0 && box_rows % 8 == 0, "the swizzle repeats after 8 rows");
#pragma unroll 1
    for (int below = 0; below < rows; below += box_rows) {
      const int key = row + below, page = key < end ? pages.page_of(key) : pages.count;
#pragma unroll
      for (int i = 0; i < to.count; ++i)
        tma_load(to.box[i][below], map, full, column + i * to.in_row, key % page_rows, head, page);
    }
  }
};
using KeyBoxes = KeyBoxesOf<(page_size > 0)>;
