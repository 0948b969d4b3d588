#pragma once
// Products of mma_split_kv with K and V in their stored type, here the operands' type. For e4m3 the
// host substitutes kernels/with/forward/parts/stored_products.cuh for this header.

#include <attention/key_head.cuh>
#include <attention/kv_dtype.cuh>
#include <forward/parts/mma_products.cuh>

template <class Scales, int Br, int columns, int Bc, int stored, int m, int n>
__device__ __forceinline__ void multiply_stored_scores(operand (&Q)[Br][columns],
                                                       operand (&K)[Bc][stored],
                                                       float (&S)[m][n][4], int first_row, int lane,
                                                       const Scales&, const KeyHead&, int) {
  multiply_scores(Q, K, S, first_row, lane);
}

template <class Scales, int Bc, int stored, int m, int n, int cols, int pack_gqa>
__device__ __forceinline__ void multiply_stored_output(operand (&V)[Bc][stored],
                                                       float (&S)[m][n][4], float (&O)[m][cols][4],
                                                       Rows<m * step, pack_gqa>& rows,
                                                       int first_key, int lane, const Scales&,
                                                       const KeyHead&) {
  multiply_output(V, S, O, rows, first_key, lane);
}

template <class Scales, int m, int n>
__device__ __forceinline__ void finish_stored(const Scales&, float (&)[m][n][4], int) {}
