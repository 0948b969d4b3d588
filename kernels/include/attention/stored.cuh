#pragma once
// Keys and values as they are stored: operands, or e4m3 with a scale for each head, or for each
// page and head.
//
// The host writes above a kernel's text `has_e4m3`: whether they are e4m3. Then struct Mods has
//   k_scale_, v_scale_  float32 [batch or 1, kv_heads], or [pages, 1, kv_heads]
// Rows of e4m3 have an even number of bytes and begin at even addresses. So copies take two of them
// as one operand.

#include <attention/pages.cuh>
#include <ptx/unpack_e4m3.cuh>

template <bool e4m3>
struct StoredAs {
  using Type = operand;
  static constexpr int in_operand = 1;
};
template <>
struct StoredAs<true> {
  using Type = E4m3;
  static constexpr int in_operand = 2;
};
using Stored = StoredAs<has_e4m3>::Type;
constexpr int in_operand = StoredAs<has_e4m3>::in_operand;  // stored numbers

// The same memory as operands.
__device__ __forceinline__ Tensor<const operand> as_operands(Tensor<const operand> tensor) {
  return tensor;
}
__device__ __forceinline__ Tensor<const operand> as_operands(Tensor<const E4m3> tensor) {
  return {reinterpret_cast<const operand*>(tensor.data), tensor.batch_stride / 2,
          tensor.head_stride / 2, tensor.row_stride / 2};
}

// The scales of a key head.
template <class Scales>
struct HeadScales {
  static constexpr bool by_page = sizeof(Scales::stride) == 3 * sizeof(long long);
  Scales scales;
  int batch, head;

  // Of a page, where there are scales of pages.
  __device__ __forceinline__ float of(int page) const {
    if constexpr (by_page) return scales.data[page * scales.stride[0] + head * scales.stride[2]];
    return scales.data[batch * scales.stride[0] + head * scales.stride[1]];
  }
  // Of a row of a head that may lie in pages.
  template <class Keys>
  __device__ __forceinline__ float of_row(const Keys& keys, int row) const {
    if constexpr (by_page) return of(keys.pages.page_of(min(row, keys.rows - 1)));
    return of(0);
  }
};

// The scales of a head's keys and values; of operands there are none.
template <class Arrays, bool e4m3 = has_e4m3>
struct Scaling {
  static constexpr bool used = false;
  __device__ __forceinline__ Scaling(const Arrays&, int, int) {}
};
template <class Arrays>
struct Scaling<Arrays, true> {
  static constexpr bool used = true;
  HeadScales<decltype(Arrays::k_scale_)> keys;
  HeadScales<decltype(Arrays::v_scale_)> values;

  __device__ __forceinline__ Scaling(const Arrays& mods, int batch, int head)
      : keys{mods.k_scale_, batch, head}, values{mods.v_scale_, batch, head} {}
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

// Rows of batch elements with their scales, with the interface of a Tensor.
template <class Keys, class Scales>
struct ScaledRows {
  Keys keys;
  Scales scales;

  __device__ __forceinline__ ScaledRow row(int batch, int head, int row) const {
    const HeadScales<Scales> own = {scales, batch, head};
    if constexpr (own.by_page)
      return {keys.row(batch, head, row), own.of(keys.pages(batch).page_of(row))};
    else
      return {keys.row(batch, head, row), own.of(0)};
  }
};

// Keys, or values, as rows of numbers.
template <class Arrays>
__device__ __forceinline__ auto rows_of_keys(Tensor<const operand> keys, const Arrays& mods) {
  return rows_of(keys, mods);
}
template <class Arrays>
__device__ __forceinline__ auto rows_of_values(Tensor<const operand> values, const Arrays& mods) {
  return rows_of(values, mods);
}
template <class Arrays>
__device__ __forceinline__ auto rows_of_keys(Tensor<const E4m3> keys, const Arrays& mods) {
  const auto rows = rows_of(keys, mods);
  return ScaledRows<decltype(rows_of(keys, mods)), decltype(mods.k_scale_)>{rows, mods.k_scale_};
}
template <class Arrays>
__device__ __forceinline__ auto rows_of_values(Tensor<const E4m3> values, const Arrays& mods) {
  const auto rows = rows_of(values, mods);
  return ScaledRows<decltype(rows_of(values, mods)), decltype(mods.v_scale_)>{rows, mods.v_scale_};
}
