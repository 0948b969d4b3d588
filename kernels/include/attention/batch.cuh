#pragma once
// Batch elements and their tiles. Here all have as many rows as the arrays; where lengths differ or
// keys lie in pages, the host puts kernels/with/attention/batch.cuh in the place of this header.

#include <tile/math.cuh>
#include <tile/tensor.cuh>

// The argument `sizes` of every launch, which the host passes.
struct Sizes {
  int M, N;           // queries and keys of a head
  int causal_offset;  // key j is seen if j <= i + causal_offset: N - M (bottom-right) or 0
                      // (top-left), plus a window's keys on the right
  int window_offset;  // key j is seen if j >= i + window_offset: N - M or 0, minus a window's keys
                      // on the left
};

// Maps rows of a batch element to rows of packed arrays. For other arrays it changes nothing.
struct Origin {
  __device__ __forceinline__ int packed_row(int row) const { return row; }
  __device__ __forceinline__ int packed_key(int key) const { return key; }
  __device__ __forceinline__ int packed_batch(int batch) const { return batch; }
};

// A batch element: its queries, keys and offsets, and where its rows begin.
struct BatchElement : Origin, Sizes {
  // Whether a tile begins with this row: in ragged batches some tile indices have no tile.
  __device__ __forceinline__ bool has_tile_of_rows(int) const { return true; }
  __device__ __forceinline__ bool has_tile_of_keys(int) const { return true; }
};

template <class Arrays>
__device__ __forceinline__ BatchElement batch_element(const Sizes& sizes, const Arrays&, int) {
  return {{}, sizes};
}

// Returns keys or values as rows of batch elements, whether they lie in pages or not.
template <class T, class Arrays>
__device__ __forceinline__ Tensor<T> rows_of(Tensor<T> tensor, const Arrays&) {
  return tensor;
}
