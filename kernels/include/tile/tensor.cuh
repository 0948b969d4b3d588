#pragma once
// A tensor [batch, heads, rows, columns] in global memory. Columns lie side by side; every other
// stride is free, so views, transposes and both layouts (BHSD, BSHD) are read in place.

template <class T>
struct Tensor {
  T* data;
  long long batch_stride, head_stride, row_stride;  // in elements

  __device__ __forceinline__ T* row(int batch, int head, int row) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// Whether every row of a tensor begins at a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ bool is_aligned(Tensor<T> tensor) {
  const long long strides = tensor.batch_stride | tensor.head_stride | tensor.row_stride;
  return (reinterpret_cast<unsigned long long>(tensor.data) | strides * sizeof(T)) % 16 == 0;
}

// Blocks are counted along one axis, tiles fastest, then heads, then batch: at most 2^31 - 1.
struct Place {
  int tile, head, batch;
};

__device__ __forceinline__ Place place(int index, int tiles, int heads) {
  return {index % tiles, index / tiles % heads, index / tiles / heads};
}
