#pragma once
// What e4m3 numbers are multiplied by: the scales of a cache's keys and values, by head or by page
// (stored.cuh), or the descales of inputs (descales.cuh).

#include <ptx/unpack_e4m3.cuh>

template <class Array>
constexpr bool is_of_pages = sizeof(Array::stride) == 3 * sizeof(long long);

// Scales of all heads; one of the strides of batch elements and of pages is 0.
struct Scales {
  const float* data;
  long long batch_stride, page_stride, head_stride;

  template <class Array>
  __device__ __forceinline__ explicit Scales(const Array& scales)
      : data(scales.data),
        batch_stride(is_of_pages<Array> ? 0 : scales.stride[0]),
        page_stride(is_of_pages<Array> ? scales.stride[0] : 0),
        head_stride(scales.stride[is_of_pages<Array> ? 2 : 1]) {}
  __device__ __forceinline__ const float* of(int batch, int page, int head) const {
    return data + batch * batch_stride + page * page_stride + head * head_stride;
  }
};

// A row of e4m3 numbers, which are multiplied by a scale.
struct ScaledRow {
  const E4m3* data;
  float scale;

  __device__ __forceinline__ float operator[](int col) const {
    return e4m3_value(data[col]) * scale;
  }
  __device__ __forceinline__ ScaledRow operator+(int cols) const { return {data + cols, scale}; }
};
