#pragma once
// Products like those of wgmma.cuh, with A by_rows and B by_columns.
#include <ptx/wgmma.cuh>

#define WGMMA_COLUMNS(n)                                                                  \
  template <class T>                                                                      \
  __device__ __forceinline__ void multiply_columns(float (&d)[n / 2], Matrix a, Matrix b, \
                                                   int added) {                           \
    unsigned r[4] = {};                                                                   \
    WGMMA_OF_TYPE(n, "%0", ",0,1");                                                       \
  }
WGMMA_EACH(WGMMA_COLUMNS)
