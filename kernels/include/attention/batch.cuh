#pragma once
// Batch elements and their tiles. Here all have as many rows as the arrays; where lengths differ or
// keys lie in pages, the host puts kernels/with/attention/batch.cuh in the place of this header.

#include <tile/math.cuh>
#include <tile/tensor.cuh>

// What the host passes, the argument `sizes` of a record.
struct Sizes {
  int M, N;           // queries and keys of a head
  int causal_offset;  // key j is seen if j <= i + causal_offset: N - M (bottom-right) or 0
                      // (top-left), plus what a window shows on the right
  int window_offset;  // key j is seen if j >= i + window_offset: the same, minus what it shows on
                      // the left
};

// Where the rows of a batch element begin in packed arrays. Of other arrays nothing is kept.
struct Origin {
  __device__ __forceinline__ int packed_row(int row) const { return row; }
  __device__ __forceinline__ int packed_key(int key) const { return key; }
  __device__ __forceinline__ int packed_batch(int batch) const { return batch; }
};

// A batch element: its queries, keys and offsets, and where its rows begin.
struct BatchElement : Origin, Sizes {
  // Whether a tile begins with this row: some numbers of tiles have none in ragged batches.
  __device__ __forceinline__ bool has_tile_of_rows(int) const { return true; }
  __device__ __forceinline__ bool has_tile_of_keys(int) const { return true; }
};

template <class Arrays>
__device__ __forceinline__ BatchElement batch_element(const Sizes& sizes, const Arrays&, int) {
  return {{}, sizes};
}

// Keys or values as rows of batch elements, in pages or not.
template <class T, class Arrays>
__device__ __forceinline__ Tensor<T> rows_of(Tensor<T> tensor, const Arrays&) {
  return tensor;
}
