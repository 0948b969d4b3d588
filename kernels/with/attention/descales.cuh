#pragma once
// Descales of e4m3 Q, K and V: one factor for each batch element and key head.
//
// The host defines has_q_descale, has_k_descale and has_v_descale above a kernel. For each one that
// is true, struct Mods has a member:
//   q_descale_, k_descale_, v_descale_  float32 [batch, kv_heads]

#include <attention/scaled_row.cuh>
#include <attention/score.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

// The descales of one head; 1 where omitted.
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

// Factors of Q, K and their product, for rows that are recomputed score by score. Finite descales
// multiply only the product, because one alone could take Q or K out of the range of float. A
// non-finite descale multiplies its operand, whose elements become infinite or NaN.
struct Factors {
  float Q, K, scores;
};
__device__ __forceinline__ Factors for_repair(const Descales& x) {
  const bool of_q = fabs(x.q) < infinity, of_k = fabs(x.k) < infinity;
  return {of_q ? 1 : x.q, of_k ? 1 : x.k, (of_q ? x.q : 1) * (of_k ? x.k : 1)};
}

// Multiplies products by the descales of Q and K before scoring them.
template <class T>
struct DescaledScorer {
  const Scorer<T>& scorer;
  float factor;

  __device__ __forceinline__ T modified(T product, const Extent& extent, Index row,
                                        Index key) const {
    if constexpr (has_q_descale || has_k_descale) product *= factor;
    return scorer.modified(product, extent, row, key);
  }
};

// Rows of e4m3 multiplied by a descale, with the interface of a Tensor. Other types stay unchanged.
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
