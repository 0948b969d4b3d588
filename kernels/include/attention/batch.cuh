#pragma once
// Batch elements and their tiles. Here every batch element uses all rows of the arrays. For ragged
// batches or paged keys the host replaces this header with kernels/with/attention/batch.cuh.

#include <tile/math.cuh>
#include <tile/tensor.cuh>

// The sizes of a problem, which the host passes to every launch.
struct Sizes {
  int M, N;  // queries and keys of a head
  // Query i sees key j if i + window_offset <= j <= i + causal_offset. Both are N - M
  // (bottom-right) or 0 (top-left), with a window minus left and plus right keys, respectively.
  int causal_offset;
  int window_offset;
};

// Maps rows of a batch element to rows of packed arrays. Other arrays need no mapping.
struct Origin {
  __device__ __forceinline__ int packed_row(int row) const { return row; }
  __device__ __forceinline__ int packed_key(int key) const { return key; }
  __device__ __forceinline__ int packed_batch(int batch) const { return batch; }
};

// A batch element: its numbers of queries and keys, its mask offsets and its first rows.
struct BatchElement : Origin, Sizes {
  // Returns whether a tile starts at this row. In ragged batches some tile indices are unused.
  __device__ __forceinline__ bool has_tile_of_rows(int) const { return true; }
  __device__ __forceinline__ bool has_tile_of_keys(int) const { return true; }
};

template <class Arrays>
__device__ __forceinline__ BatchElement batch_element(const Sizes& sizes, const Arrays&, int) {
  return {{}, sizes};
}

// Returns keys or values, paged or not, which are then addressed by row of a batch element.
template <class T, class Arrays>
__device__ __forceinline__ Tensor<T> rows_of(Tensor<T> tensor, const Arrays&) {
  return tensor;
}
