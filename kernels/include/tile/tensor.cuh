#pragma once
// A tensor [batch, heads, rows, columns] in global memory. Columns are contiguous; all other
// strides are arbitrary, so views, transposes and both layouts (BHSD, BSHD) are read in place. In a
// `packed` launch (attention/batch.cuh) a batch element is a sequence of packed rows.

template <class T>
struct Tensor {
  T* data;
  long long batch_stride, head_stride, row_stride;  // in elements

  // In a packed launch, batch_stride is the address of an array: the first row of each sequence.
  __device__ __forceinline__ const int* first_rows() const {
    return reinterpret_cast<const int*>(batch_stride);
  }
  __device__ __forceinline__ T* row(int batch, int head, int row) const {
    if constexpr (packed)
      return data + head * head_stride + (first_rows()[batch] + (long long)row) * row_stride;
    return data + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// Returns whether every row of a tensor starts at a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ bool is_aligned(Tensor<T> tensor) {
  const long long of_batch = packed ? 0 : tensor.batch_stride;
  const long long strides = of_batch | tensor.head_stride | tensor.row_stride;
  return (reinterpret_cast<unsigned long long>(tensor.data) | strides * sizeof(T)) % 16 == 0;
}

// The grid is one axis of at most 2^31 - 1 blocks: tiles vary fastest, then heads, then the batch.
struct Place {
  int tile, head, batch;
};

__device__ __forceinline__ Place place(int index, int tiles, int heads) {
  return {index % tiles, index / tiles % heads, index / tiles / heads};
}
