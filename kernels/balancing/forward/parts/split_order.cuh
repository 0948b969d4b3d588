#pragma once
// The splits of a split-KV kernel if lengths differ: longer batch elements have more of them.
//
// For each row tile and head, the grid has max(`planned`, 2) blocks per batch element.
// If all elements have equally many tiles of keys, each has `planned` splits. Otherwise splits have
// the smallest number of tiles for which there are enough blocks. All lanes of a warp call these
// functions together.

#include <attention/batch.cuh>
#include <ptx/dependent_launch.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

// The lengths of all batch elements, in tiles of keys.
template <class Arrays>
struct Elements {
  const Sizes& sizes;
  const Arrays& mods;
  int count, lane;

  __device__ Elements(const Sizes& sizes, const Arrays& mods)
      : sizes(sizes), mods(mods), count(mods.seqused_k_.size[0]), lane(threadIdx.x % warp_size) {}

  // An element without keys counts as one tile, whose block writes its rows.
  __device__ __forceinline__ int tiles(int element) const {
    return max(1, cdiv(used_keys(mods, element, sizes.N).count, Bc));
  }

  __device__ __forceinline__ bool are_alike() const {
    const int first = tiles(0);
    bool alike = tiles(min(lane, count - 1)) == first;
#pragma unroll 1
    for (int i = lane + warp_size; i < count; i += warp_size) alike &= tiles(i) == first;
    return __all_sync(full_warp, alike);
  }

  // Returns the number of splits of an element if a split has `size` tiles.
  __device__ __forceinline__ int splits(int element, int size) const {
    return min(cdiv(tiles(element), size), most_splits);
  }

  template <class Number>
  __device__ __forceinline__ int sum(Number number) const {
    int own = 0;
#pragma unroll 1
    for (int i = lane; i < count; i += warp_size) own += number(i);
    return warp_sum(own);
  }

  // Returns the smallest number of tiles in a split for which there are enough blocks.
  __device__ __forceinline__ int tiles_in_split(int planned) const {
    const int blocks = count * max(planned, 2), all = sum([&](int i) { return tiles(i); });
    // Each element has at most one split that is not full, so `high` tiles are enough.
    int low = cdiv(all, blocks), high = cdiv(all, blocks - count);
    while (low < high) {
      const int middle = (low + high) / 2;
      if (sum([&](int i) { return splits(i, middle); }) <= blocks)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

// Finds the split of a block if lengths differ, and returns the number of splits of its element.
// Blocks are in the order of tiles of rows, heads, and splits of all elements.
template <class Arrays>
__device__ __forceinline__ int find_split(Place& own, const Elements<Arrays>& elements, int tiles,
                                          int heads, int planned) {
  const auto [tile, head, wanted] = place(blockIdx.x, tiles, heads);
  const int size = elements.tiles_in_split(planned);
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < elements.count; base += warp_size) {
    const int element = base + elements.lane;
    const int count = element < elements.count ? elements.splits(element, size) : 0;
    int end = count;  // splits of the elements up to the lane's
#pragma unroll
    for (int lanes = 1; lanes < warp_size; lanes *= 2) {
      const int of_others = __shfl_up_sync(full_warp, end, lanes);
      if (elements.lane >= lanes) end += of_others;
    }
    end += before;
    if (const unsigned found = __ballot_sync(full_warp, wanted < end)) {
      const int from = __ffs(found) - 1, of_element = __shfl_sync(full_warp, count, from);
      const int split = wanted - (__shfl_sync(full_warp, end, from) - of_element);
      own = {split * tiles + tile, head, base + from};
      return of_element;
    }
    before = __shfl_sync(full_warp, end, warp_size - 1);
  }
  own.batch = 0;
  return 0;
}

// Waits for the previous launch, then lets merge_splits begin, which may therefore read lengths
// before it waits. `own` is the block's place if all elements have `planned` splits; otherwise it
// is replaced. Returns the number of splits of the element, or 0 for a surplus block.
template <class Arrays>
__device__ __forceinline__ int splits_of(int planned, Place& own, int tiles, int heads,
                                         const Sizes& sizes, const Arrays& mods) {
  wait_for_launch_before();
  launch_dependents();
  const Elements<Arrays> elements(sizes, mods);
  if (__builtin_expect(!elements.are_alike(), false))
    return find_split(own, elements, tiles, heads, planned);
  if (own.batch < elements.count) return planned;
  own.batch = 0;
  return 0;
}

// Returns the number of splits of the element of a row; `row` counts those of all heads.
template <class Arrays>
__device__ __forceinline__ int splits_of(int planned, unsigned row, int heads, const Sizes& sizes,
                                         const Arrays& mods) {
  const Elements<Arrays> elements(sizes, mods);
  if (elements.are_alike()) return planned;
  return elements.splits(int(row) / (sizes.M * heads), elements.tiles_in_split(planned));
}
