#pragma once
// Products like those of wgmma.cuh, with A in registers and B by_rows.
#include <ptx/wgmma.cuh>

#define WGMMA_ROWS(n)                                                                      \
  template <class T>                                                                       \
  __device__ __forceinline__ void multiply_rows(float (&d)[n / 2], const unsigned (&A)[4], \
                                                Matrix b, int added) {                     \
    Matrix a = {};                                                                         \
    unsigned r[4] = {A[0], A[1], A[2], A[3]};                                              \
    WGMMA_OF_TYPE(n, "{%3,%4,%5,%6}", ",0");                                               \
  }
WGMMA_EACH(WGMMA_ROWS)
