#pragma once
// What a score depends on besides q·k and the scale: nothing here. For expressions, sinks, dropout
// or block masks the host replaces this header with kernels/with/attention/score_context.cuh.

#include <tile/math.cuh>

struct Mods;  // arrays and numbers of options (extent.cuh)
constexpr bool has_expressions = false, has_context = false;

using Index = int;  // index of a query or key in expressions

template <bool at_end>
__device__ __forceinline__ Index index_of(int base, int more, int) {
  return base + more;
}

// A score and its derivative with respect to scale * q·k.
template <class T>
struct Scored {
  T score, slope;
};

// Iterates over the tiles of keys or rows to visit: here all tiles.
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
  // Returns whether all pairs of a tile are known to be visible.
  template <int size>
  __device__ __forceinline__ bool is_full(int) const {
    return false;
  }
};

// The batch element and head of a score; empty here.
struct Context {
  __device__ __forceinline__ void take(int, int, int, int, const Mods&) {}
  template <bool = false, class Products, class T>
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

// Returns the extent of another head, which is the same here.
template <class Extent>
__device__ __forceinline__ const Extent& extent_of_head(const Extent& extent, int) {
  return extent;
}
