#pragma once
// The dtype of stored keys and values: the operands' dtype, or e4m3 with scales per head or page.
//
// The host defines `has_e4m3` above a kernel: true if keys and values are e4m3. Mods then has
//   k_scale_, v_scale_  float32 [batch or 1, kv_heads], or [pages, 1, kv_heads]
// Rows of e4m3 have an even number of bytes and start at even addresses, so that copies can move
// two elements as one operand.

#include <attention/batch.cuh>
#include <attention/scaled_row.cuh>

// Arrays of e4m3, convertible to arrays of operands. Keys and values are separate types, so that
// rows_of() selects the right scales.
struct E4m3Tensor : Tensor<const E4m3> {
  __device__ __forceinline__ operator Tensor<const operand>() const {
    return {reinterpret_cast<const operand*>(data), batch_stride / 2, head_stride / 2,
            row_stride / 2};
  }
};
struct E4m3Keys : E4m3Tensor {};
struct E4m3Values : E4m3Tensor {};

template <bool e4m3>
struct StoredAs {
  using Type = operand;
  using Keys = Tensor<const operand>;
  using Values = Tensor<const operand>;
  static constexpr int in_operand = 1;
};
template <>
struct StoredAs<true> {
  using Type = E4m3;
  using Keys = E4m3Keys;
  using Values = E4m3Values;
  static constexpr int in_operand = 2;
};
using Stored = StoredAs<has_e4m3>::Type;
using StoredKeys = StoredAs<has_e4m3>::Keys;
using StoredValues = StoredAs<has_e4m3>::Values;
constexpr int in_operand = StoredAs<has_e4m3>::in_operand;  // stored numbers per operand

template <class Array>
constexpr bool is_of_pages = sizeof(Array::stride) == 3 * sizeof(long long);

// Scales of all heads. Either the batch stride or the page stride is 0.
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

template <bool of_pages>
struct HeadScales {
  static constexpr bool by_page = of_pages;
  const float* data;
  long long page_stride;

  __device__ __forceinline__ HeadScales(const Scales& scales, int batch, int head)
      : data(scales.of(batch, 0, head)), page_stride(scales.page_stride) {}
  // of_all() returns the scale of all rows; of_row() the scale of one row, which may lie in a page.
  __device__ __forceinline__ float of_all() const { return *data; }
  template <class Keys>
  __device__ __forceinline__ float of_row(const Keys& keys, int row) const {
    if constexpr (of_pages)
      return data[keys.pages.page_of(min(row, keys.rows - 1)) * page_stride];
    else
      return of_all();
  }
};

// The scales of a head's keys and values; unused if they are stored as operands.
template <class Arrays, bool e4m3 = has_e4m3>
struct Scaling {
  static constexpr bool used = false;
  __device__ __forceinline__ Scaling(const Arrays&, int, int) {}
};
template <class Arrays>
struct Scaling<Arrays, true> {
  static constexpr bool used = true;
  HeadScales<is_of_pages<decltype(Arrays::k_scale_)>> keys;
  HeadScales<is_of_pages<decltype(Arrays::v_scale_)>> values;

  __device__ __forceinline__ Scaling(const Arrays& mods, int batch, int head)
      : keys(Scales(mods.k_scale_), batch, head), values(Scales(mods.v_scale_), batch, head) {}
};

// Keys or values as rows of scaled numbers, with the interface of a Tensor.
template <class Keys>
struct ScaledRows {
  Keys keys;
  Scales scales;

  __device__ __forceinline__ ScaledRow row(int batch, int head, int row) const {
    int page = 0;
    if constexpr (page_size > 0) page = keys.pages(batch).page_of(row);
    return {keys.row(batch, head, row), *scales.of(batch, page, head)};
  }
};
template <class Arrays, class Array>
__device__ __forceinline__ auto scaled_rows(Tensor<const E4m3> tensor, const Arrays& mods,
                                            const Array& scales) {
  const auto rows = rows_of(tensor, mods);
  return ScaledRows<decltype(rows_of(tensor, mods))>{rows, Scales(scales)};
}
template <class Arrays>
__device__ __forceinline__ auto rows_of(E4m3Keys tensor, const Arrays& mods) {
  return scaled_rows(tensor, mods, mods.k_scale_);
}
template <class Arrays>
__device__ __forceinline__ auto rows_of(E4m3Values tensor, const Arrays& mods) {
  return scaled_rows(tensor, mods, mods.v_scale_);
}
