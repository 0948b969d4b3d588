#pragma once
// Copies split float32 operands into shared memory.

#include <ptx/cp_async.cuh>
#include <tile/async_copy.cuh>

// Waits until the copies of all threads have arrived and earlier tiles may be overwritten.
__device__ __forceinline__ void meet() {
  cp_async_wait_group<0>();
  __syncthreads();
}

// The high and low parts of a head, with contiguous rows.
template <int columns>
struct SplitHead {
  Head high, low;

  __device__ __forceinline__ SplitHead(Tensor<const operand> high, Tensor<const operand> low,
                                       int batch, int head, int rows)
      : high(high, batch, head, rows), low(low, batch, head, rows) {
    this->high.aligned = this->low.aligned = true;
    this->high.stride = this->low.stride = columns;
  }
  template <int threads, int heads = 1, int height>
  __device__ __forceinline__ void copy(operand (&tile)[2][height][columns], int first_row) const {
    copy_rows<threads, columns, heads>(tile[0], high, first_row);
    copy_rows<threads, columns, heads>(tile[1], low, first_row);
  }
};
