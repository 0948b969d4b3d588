#pragma once
// Rounds P to T and packs it as operands of P V; dropped weights become 0.
#include <attention/row_state.cuh>
#include <tile/warpgroup_products.cuh>

// A score, as an exponent of two, may exceed its row's maximum by this much before the maximum is
// raised. P is then at most 2^8, and float16 holds numbers up to almost 2^16.
constexpr int slack = 8;

template <class T, int steps, int count, int pack_gqa>
__device__ __forceinline__ void pack_weights(const float (&S)[count], unsigned (&P)[steps][4],
                                             const Rows<step, pack_gqa>& rows, int first_key) {
  pack_operands<T>(S, P);
  if constexpr (has_dropout) drop_operands(P, rows, first_key);
}
