#pragma once
// What Q, K and V of e4m3 are multiplied by: a number for each batch element and key head.
//
// The host writes above a kernel's text has_q_descale, has_k_descale and has_v_descale: whether
// struct Mods has
//   q_descale_, k_descale_, v_descale_  float32 [batch, kv_heads]

#include <attention/scales.cuh>
#include <tile/tensor.cuh>

// The descales of Q, of K and of V; one that is not given is 1.
template <class Arrays>
__device__ __forceinline__ float q_descale([[maybe_unused]] const Arrays& mods,
                                           [[maybe_unused]] int batch,
                                           [[maybe_unused]] int kv_head) {
  if constexpr (has_q_descale) return *Scales(mods.q_descale_).of(batch, 0, kv_head);
  return 1.0f;
}
template <class Arrays>
__device__ __forceinline__ float k_descale([[maybe_unused]] const Arrays& mods,
                                           [[maybe_unused]] int batch,
                                           [[maybe_unused]] int kv_head) {
  if constexpr (has_k_descale) return *Scales(mods.k_descale_).of(batch, 0, kv_head);
  return 1.0f;
}
template <class Arrays>
__device__ __forceinline__ float v_descale([[maybe_unused]] const Arrays& mods,
                                           [[maybe_unused]] int batch,
                                           [[maybe_unused]] int kv_head) {
  if constexpr (has_v_descale) return *Scales(mods.v_descale_).of(batch, 0, kv_head);
  return 1.0f;
}

// The rows of a head times its descale, with the interface of a Tensor.
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
// Other numbers stay as they are.
template <class T>
__device__ __forceinline__ Tensor<const T> descaled(Tensor<const T> rows, float) {
  return rows;
}
