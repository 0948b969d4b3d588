#pragma once
// The context of a score besides q·k and the scale: empty here. Where there are expressions, sinks,
// dropout or block masks, the host puts kernels/with/attention/score_context.cuh in place of this
// header.

#include <tile/math.cuh>

struct Mods;  // arrays and numbers of options (extent.cuh)
constexpr bool has_expressions = false, has_context = false;

using Index = int;  // of a query or key, for expressions

template <bool at_end>
__device__ __forceinline__ Index index_of(int base, int more, int) {
  return base + more;
}

// A score and d score / d (scale * q·k).
template <class T>
struct Scored {
  T score, slope;
};

// The tiles of keys or rows to visit, without those that lie before `first`: all.
struct KeyTiles {
  template <int size>
  __device__ __forceinline__ int from(int first) const {
    return first;
  }
  template <int size>
  __device__ __forceinline__ int after(int first) const {
    return first + size;
  }
  template <int size>
  __device__ __forceinline__ int stride(int) const {
    return size;
  }
  // Whether the mask is known to show all pairs of a tile.
  template <int size>
  __device__ __forceinline__ bool is_full(int) const {
    return false;
  }
};

// The batch element and head of a score.
struct Context {
  __device__ __forceinline__ void take(int, int, int, int, const Mods&) {}
  template <class Products, class T>
  __device__ __forceinline__ void cap(Products&, T) const {}
  __device__ __forceinline__ bool shows(int, int, int) const { return true; }
  __device__ __forceinline__ real sink(int = 0) const { return -infinity; }
  template <class T>
  __device__ __forceinline__ T dropped(T x, int, int) const {
    return x;
  }
  __device__ __forceinline__ real kept_factor() const { return 1; }
  __device__ __forceinline__ KeyTiles key_tiles(int) const { return {}; }
  __device__ __forceinline__ KeyTiles row_tiles(int) const { return {}; }
  __device__ __forceinline__ int longest(int, int rank) const { return rank; }
};

// Returns the extent of another head: here the same.
template <class Extent>
__device__ __forceinline__ const Extent& extent_of_head(const Extent& extent, int) {
  return extent;
}
