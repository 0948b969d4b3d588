#pragma once
// The geometry of one batch element: how many queries and keys it has, and which keys each query
// sees. Query i sees keys kv_begin(i) … kv_end(i) - 1: a causal mask and the number of keys set
// kv_end, the left end of a window sets kv_begin. The host defines above every kernel:
//  - types: scalar (of the tensors); result (of O, dQ, dK and dV); real (of sums and lse: float, or
//    double for float64); operand (of products on tensor cores; may be narrower than scalar); and
//    Mods, the struct of arrays and numbers that options need, empty without any;
//  - constants of sizes and tiles, which the first comment of a .cu file names;
//  - options: causal, windowed, positive_scale; packed, ragged (batch.cuh), page_size (pages.cuh)
//    and those that score_context.cuh in kernels/with/attention lists.

#include <attention/batch.cuh>
#include <attention/score_context.cuh>

// Whether some row may not see all keys of a tile that exist.
constexpr bool has_mask = causal || windowed || has_mask_mod || ragged;

struct Extent : Context, BatchElement {  // M and N come from its BatchElement's Sizes
  __device__ __forceinline__ int kv_end(int row) const {
    if constexpr (causal) return max(0, min(N, row + causal_offset + 1));
    return N;
  }

  __device__ __forceinline__ int kv_begin(int row) const {
    if constexpr (windowed) return max(0, min(N, row + window_offset));
    return 0;
  }

  // Whether a row sees a key.
  __device__ __forceinline__ bool sees(int row, int key, int more = 0) const {
    return in_reach(row, key) && shown(row, key, more);
  }

  // Whether causal masks and windows show a pair. A key left of the window makes `inside` negative:
  // as unsigned, it is larger than any distance in the window, so one comparison checks both ends.
  __device__ __forceinline__ bool in_reach(int row, int key) const {
    if constexpr (windowed) {
      const int inside = key - row - window_offset;
      return key < N &&
             (causal ? unsigned(inside) <= unsigned(causal_offset - window_offset) : inside >= 0);
    }
    return key < kv_end(row);
  }

  // Whether mask expressions show a pair, in reach or not.
  __device__ __forceinline__ bool shown(int row, int key, int more = 0) const {
    return !has_mask_mod || shows(index_of<true>(row, 0, M), index_of<true>(key, 0, N), more);
  }

  // Whether mask expressions hide a pair that exists.
  template <class Key>
  __device__ __forceinline__ bool hides(Index row, Key key, int more = 0) const {
    return has_mask_mod && !shows(row, key, more);
  }
};

// The geometry of a batch element; every kernel takes its sizes from here.
__device__ __forceinline__ Extent extent_of(const Sizes& sizes, [[maybe_unused]] int batch) {
  return {{}, {{}, sizes}};
}

template <class Arrays>
__device__ __forceinline__ Extent extent_of(const Sizes& sizes, const Arrays& mods, int batch) {
  return {{}, batch_element(sizes, mods, batch)};
}

// Returns the extent of one head, with access to its expressions, sink and dropout.
__device__ __forceinline__ Extent extent_of(const Sizes& sizes, const Mods& mods, int batch,
                                            int head) {
  Extent extent = extent_of(sizes, mods, batch);
  extent.take(batch, head, extent.M, extent.N, mods);
  return extent;
}
