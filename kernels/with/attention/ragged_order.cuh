#pragma once
// The order of the tiles of a ragged batch, computed by a warp: longest first, in sets that follow
// one another. A set has the tiles of up to 32 sequences and of some heads, about four for each SM
// of an H100, so that few rows are in use at a time. All lanes of a warp call these functions
// together.

#include <attention/extent.cuh>
#include <attention/tile_index.cuh>
#include <tile/warp.cuh>

// Returns the maximum over a warp in every lane.
__device__ __forceinline__ int warp_maximum(int value) {
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(full_warp, value, distance));
  return value;
}

// Returns the sum over the lanes before the own one.
__device__ __forceinline__ int sum_of_lanes_before(int value) {
  int sum = value;
#pragma unroll
  for (int lanes = 1; lanes < warp_size; lanes *= 2) {
    const int of_others = __shfl_up_sync(full_warp, sum, lanes);
    if (int(threadIdx.x % warp_size) >= lanes) sum += of_others;
  }
  return sum - value;
}

// The tiles of up to 32 sequences, one for each lane. Under a causal mask each tile of a sequence
// is shorter by one than the tile before it, in the order from the longest to the shortest one.
struct TileLengths {
  int count, longest;

  // Returns how many tiles of the lane's sequence have at least this length.
  __device__ __forceinline__ int at_least(int length) const {
    if constexpr (causal) return max(0, min(count, longest - length + 1));
    return longest >= length ? count : 0;
  }

  // Returns the length of the tile of this rank among all tiles, found by binary search.
  __device__ __forceinline__ int length_of(int rank) const {
    int low = -warp_maximum(causal ? count - longest - 1 : -longest), high = warp_maximum(longest);
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (warp_sum(at_least(middle)) > rank)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }

  // Finds the tile of this rank: returns the lane of its sequence, and its rank there.
  __device__ __forceinline__ int lane_of(int rank, int& own_rank) const {
    const int length = length_of(rank), longer = at_least(length + 1);
    const int own = at_least(length) - longer;
    const int place = rank - warp_sum(longer) - sum_of_lanes_before(own);
    const int lane = __ffs(__ballot_sync(full_warp, place >= 0 && place < own)) - 1;
    own_rank = __shfl_sync(full_warp, longer + place, lane);
    return lane;
  }
};

constexpr int tiles_in_set = 4 * 132;  // tiles sorted together: four for each SM of an H100

// Tiles of `size` rows, or keys if `of_keys`, of all heads and sequences. As in tile_index.cuh,
// sequences have room for a partial last tile. Unused indices are the last ones of a group.
template <int size, bool of_keys>
struct RaggedOrder {
  const Sizes& sizes;
  int heads, sequences, of_head, group;  // group: the number of sequences that are sorted together

  template <class Arrays>
  __device__ __forceinline__ RaggedOrder(const Sizes& sizes, const Arrays& mods, int heads,
                                         int batch)
      : sizes(sizes), heads(heads), sequences(batch) {
    if constexpr (Arrays::is_packed) sequences = mods.cu_seqlens_q_.size[0] - 1;
    of_head = first_tile(mods, sequences);
    group = max(1, min(warp_size, tiles_in_set * sequences / max(1, of_head)));
  }

  // Returns the index of a sequence's first tile, counted in one head.
  template <class Arrays>
  __device__ __forceinline__ int first_tile(const Arrays& mods, int sequence) const {
    if constexpr (!Arrays::is_packed)
      return sequence * cdiv(of_keys ? sizes.N : sizes.M, size);
    else if constexpr (of_keys)
      return first_tile_number<size, 1>(mods.cu_seqlens_k_, sequence, sizes.N);
    else
      return first_tile_number<size, 1>(mods.cu_seqlens_q_, sequence, sizes.M);
  }

  // Finds the tile at this place of the order: its head, its sequence, and its rank among the tiles
  // of this head and sequence, from the longest on. Returns whether there is one.
  template <class Arrays>
  __device__ __forceinline__ bool find(int index, const Arrays& mods, Place& found) const {
    int first = 0, last = (sequences - 1) / group;  // groups
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (first_tile(mods, middle * group) * heads <= index)
        first = middle;
      else
        last = middle - 1;
    }
    first *= group;
    index -= first_tile(mods, first) * heads;
    const TileLengths own = lengths(mods, first);
    const int all = warp_sum(own.count);
    if (index < 0 || index >= all * heads) return false;  // rows of no sequence come first
    const int sets = max(1, (all * heads + tiles_in_set / 2) / tiles_in_set);
    const int of_set = cdiv(heads, sets);
    const int head = index / (of_set * all) * of_set, together = min(of_set, heads - head);
    index -= head * all;
    found.head = head + index % together;
    found.batch = first + own.lane_of(index / together, found.tile);
    return true;
  }

 private:
  // Measures the tiles of the lane's sequence.
  template <class Arrays>
  __device__ __forceinline__ TileLengths lengths(const Arrays& mods, int first) const {
    const int lane = threadIdx.x % warp_size, sequence = first + lane;
    if (lane >= group || sequence >= sequences) return {0, 0};
    const Extent extent = extent_of(sizes, mods, sequence);
    if constexpr (of_keys)
      return {cdiv(extent.N, size), cdiv(extent.M + (causal ? extent.causal_offset : 0), size)};
    else
      return {cdiv(extent.M, size), cdiv(extent.kv_end(extent.M - 1), size)};
  }
};
