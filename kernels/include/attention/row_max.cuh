#pragma once
// The largest score of each row: not computed here. If a call requests it, the host replaces this
// header with kernels/with/attention/row_max.cuh.

#include <tile/math.cuh>

constexpr int stored_maxima = 1;

template <int rows>
struct RowMaxima {
  __device__ __forceinline__ real row_max(int) const { return -infinity; }
  __device__ __forceinline__ void set_row_max(int, real) {}
  __device__ __forceinline__ void raise_row_max(int, real) {}
};

template <class Extent>
__device__ __forceinline__ void write_row_max(const Extent&, int, real, real, int = 0) {}
