#pragma once
// The tile scheduler of persistent blocks, with a variant for ragged batches.

#include <attention/tile_index.cuh>
#include <forward/parts/static_schedule.cuh>

// Schedules tiles of ragged batches in batch order. Skips tile indices past the end of a sequence.
template <int Br, int Bc>
struct RaggedSchedule {
  Sizes sizes;
  const Mods* mods;
  int heads, all, index;
  Place found;

  __device__ __forceinline__ RaggedSchedule(const Sizes& sizes, const Mods& mods, int heads,
                                            int batch)
      : sizes(sizes),
        mods(&mods),
        heads(heads),
        all(tiles_of_rows<Br>(sizes, mods) * heads * (packed ? 1 : batch)),
        index(int(blockIdx.x) - int(gridDim.x)) {}

  __device__ __forceinline__ bool advance() {
    while ((index += gridDim.x) < all) {
      found = place_of_rows<Br>(index, sizes, *mods, heads);
      const Extent extent = extent_of(sizes, *mods, found.batch);
      if (extent.has_tile_of_rows(found.tile * Br)) return true;
    }
    return false;
  }
  __device__ __forceinline__ RowTile task() const {
    const Extent extent = extent_of(sizes, *mods, found.batch);
    RowTile task = row_tile<Br, Bc>(extent, found.tile * Br, found.head, found.batch);
    if (extent.N == 0) task.kv_begin = Bc;  // a hidden tile, aligned for bias copies
    task.kv_end = max(task.kv_end, task.kv_begin + 1);
    return task;
  }
  template <int rows>
  __device__ __forceinline__ int own_end(const RowTile& task, int warpgroup, int most) const {
    if constexpr (!causal) return task.kv_end;
    const Extent extent = extent_of(sizes, *mods, task.batch);
    const int own = extent.kv_end(min(task.row + (warpgroup + 1) * rows, extent.M) - 1);
    return max(max(own, task.kv_end - most * Bc), task.kv_begin + 1);
  }
};

template <bool by_lengths, int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
struct ScheduleOf {
  using Type = StaticSchedule<Br, Bc, by_length, batch_first, may_skip>;
};
template <int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
struct ScheduleOf<true, Br, Bc, by_length, batch_first, may_skip> {
  using Type = RaggedSchedule<Br, Bc>;
};
template <int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
using Schedule = typename ScheduleOf<ragged, Br, Bc, by_length, batch_first, may_skip>::Type;
