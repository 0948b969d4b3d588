#pragma once
// Stores four matrices to shared memory and transposes each. Lane l passes the address of row l % 8
// of stored matrix l / 8, and elements [2 * (l % 4)][l / 4] and [2 * (l % 4) + 1][l / 4] of each
// matrix.  PTX: stmatrix.sync.aligned.m8n8.x4.trans.shared.b16, from sm_90 on

__device__ __forceinline__ void store_matrices_transposed(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   unsigned(__cvta_generic_to_shared(row))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
