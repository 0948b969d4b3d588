#pragma once
// Geometry of one batch element: how many queries and keys it has, and which keys each query sees.
// Query i sees keys kv_begin(i) … kv_end(i) - 1. kv_end depends on the causal mask and the number
// of keys, kv_begin on the left edge of the window. The host prepends definitions to each kernel:
// - types: scalar (element type of the inputs), result (of O, dQ, dK and dV), real (of sums and
//   lse: float, or double for float64 inputs), operand (of tensor-core operands; may be narrower
//   than scalar) and Mods (a struct of the arrays and numbers that options use; may be empty);
// - the size and tile constants listed in the comment at the top of the kernel's .cu file;
// - option flags: causal, windowed, positive_scale; packed, ragged (batch.cuh); page_size
//   (pages.cuh); and the flags listed in kernels/with/attention/score_context.cuh.

#include <attention/batch.cuh>
#include <attention/score_context.cuh>

// Whether a mask may hide existing keys from some rows.
constexpr bool has_mask = causal || windowed || has_mask_mod || ragged;

struct Extent : Context, BatchElement {  // M and N are members of Sizes
  __device__ __forceinline__ int kv_end(int row) const {
    if constexpr (causal) return max(0, min(N, row + causal_offset + 1));
    return N;
  }

  __device__ __forceinline__ int kv_begin(int row) const {
    if constexpr (windowed) return max(0, min(N, row + window_offset));
    return 0;
  }

  __device__ __forceinline__ bool sees(int row, int key, int more = 0) const {
    return in_reach(row, key) && shown(row, key, more);
  }

  // Returns whether a pair is within the causal mask and the window. Left of the window `inside` is
  // negative; as unsigned it exceeds any distance in the window, so one comparison checks both
  // ends.
  __device__ __forceinline__ bool in_reach(int row, int key) const {
    if constexpr (windowed) {
      const int inside = key - row - window_offset;
      return key < N &&
             (causal ? unsigned(inside) <= unsigned(causal_offset - window_offset) : inside >= 0);
    }
    return key < kv_end(row);
  }

  // Returns whether mask expressions leave a pair visible, regardless of in_reach().
  __device__ __forceinline__ bool shown(int row, int key, int more = 0) const {
    return !has_mask_mod || shows(index_of<true>(row, 0, M), index_of<true>(key, 0, N), more);
  }

  // Returns whether mask expressions hide an existing pair.
  template <class Key>
  __device__ __forceinline__ bool hides(Index row, Key key, int more = 0) const {
    return has_mask_mod && !shows(row, key, more);
  }
};

// Returns the geometry of a batch element, from which every kernel reads its sizes.
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
