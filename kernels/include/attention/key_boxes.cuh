#pragma once
// The rows of one key head, from which TMA copies tiles of keys or values. For paged keys the host
// replaces this header with kernels/with/attention/key_boxes.cuh.

#include <tile/tma_tile.cuh>

struct KeyBoxes {
  const TensorMap& map;
  int head, batch;

  template <class Task>
  __device__ __forceinline__ KeyBoxes(const TensorMap& map, const Mods&, const Task& task, int head)
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
