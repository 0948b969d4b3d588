#pragma once
// Tasks of kernels that pack the rows of several heads into a tile of Q, and that may split its
// keys among several blocks.

#include <attention/row_tile.cuh>
#include <forward/parts/key_split.cuh>
#include <tile/tensor.cuh>

// A tile of Q, from query `row` on, of pack_gqa heads from `head` on, and a split of its keys.
struct Task : RowTile {
  int split;
  bool exists;  // false past the end of a batch element
};

// Returns the task with this index, a tile of `queries` rows of each of `pack_gqa` heads. Under a
// causal mask a head's longest tiles come first.
template <int queries, int Bc, int pack_gqa>
__device__ __forceinline__ Task task_at(int index, const Sizes& sizes, const Mods& mods, int heads,
                                        const KeySplits& splits) {
  const int tiles = cdiv(sizes.M, queries);
  const auto [tile, group, batch] = place(index, tiles * splits.count(), heads / pack_gqa);
  const int row = (tiles - 1 - tile % tiles) * queries, split = tile / tiles;
  const Extent extent = extent_of(sizes, mods, batch);
  Task task = {row_tile<queries, Bc>(extent, row, group * pack_gqa, batch), split,
               extent.has_tile_of_rows(row)};
  splits.take(task, split);
  return task;
}
