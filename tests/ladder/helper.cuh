#pragma once
#include <tile/math.cuh>

__device__ real dot(const scalar* a, const scalar* b) {
  real sum = 0;
  for (int i = 0; i < d; ++i) sum += real(a[i]) * real(b[i]);
  return sum;
}
