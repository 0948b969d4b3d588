#pragma once
// Packs P as operands of the product with V, rounded to T, without dropped weights.
#include <attention/row_state.cuh>
#include <tile/warpgroup_products.cuh>

template <class T, int steps, int count, int pack_gqa>
__device__ __forceinline__ void pack_weights(const float (&S)[count], unsigned (&P)[steps][4],
                                             const Rows<step, pack_gqa>& rows, int first_key) {
  pack_operands<T>(S, P);
  if constexpr (has_dropout) drop_operands(P, rows, first_key);
}
