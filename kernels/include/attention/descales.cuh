#pragma once
// What Q, K and V of e4m3 are multiplied by: a number for each batch element and key head.
//
// The host writes above a kernel's text has_q_descale, has_k_descale and has_v_descale: whether
// struct Mods has
//   q_descale_, k_descale_, v_descale_  float32 [batch, kv_heads]

#include <attention/scaled_row.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

// Those of a head; one that is not given is 1.
struct Descales {
  float q = 1, k = 1, v = 1;
};
template <class Arrays>
__device__ __forceinline__ Descales descales_of([[maybe_unused]] const Arrays& mods,
                                                [[maybe_unused]] int batch,
                                                [[maybe_unused]] int kv_head) {
  Descales found;
  if constexpr (has_q_descale) found.q = *mods.q_descale_.row(batch, kv_head);
  if constexpr (has_k_descale) found.k = *mods.k_descale_.row(batch, kv_head);
  if constexpr (has_v_descale) found.v = *mods.v_descale_.row(batch, kv_head);
  return found;
}
__device__ __forceinline__ bool are_finite(const Descales& x) {
  return fabs(x.q) < infinity && fabs(x.k) < infinity && fabs(x.v) < infinity;
}

// Rows times a descale, with the interface of a Tensor; others than e4m3 stay as they are.
struct DescaledRows {
  Tensor<const E4m3> rows;
  float descale;

  __device__ __forceinline__ ScaledRow row(int batch, int head, int row) const {
    return {rows.row(batch, head, row), descale};
  }
};
__device__ __forceinline__ DescaledRows descaled(Tensor<const E4m3> rows, float descale) {
  return {rows, descale};
}
template <class T>
__device__ __forceinline__ Tensor<const T> descaled(Tensor<const T> rows, float) {
  return rows;
}
