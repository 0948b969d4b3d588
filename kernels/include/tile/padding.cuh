#pragma once
// Row lengths in shared memory that keep a column of a tile out of one bank.

#include <tile/math.cuh>

// The least row length >= width, in elements, that is an odd multiple of 16 bytes: 8 threads
// reading 16 bytes each from 8 rows one below the other then touch all 32 banks once.
template <class T>
__host__ __device__ constexpr int padded(int width) {
  constexpr int step = 16 / sizeof(T);
  return (cdiv(width, step) | 1) * step;
}
