#pragma once
// Reads lse and delta of any row of one batch element.

#include <backward/parts/row_stats.cuh>
#include <tile/tensor.cuh>

struct StatsInMemory {
  Tensor<const real> lse, delta;
  int batch;

  __device__ __forceinline__ RawStats operator()(int head, int row) const {
    return {*lse.row(batch, head, row), *delta.row(batch, head, row)};
  }
};
