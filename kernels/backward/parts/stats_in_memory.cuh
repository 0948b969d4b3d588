#pragma once
// What the forward pass left of any row of a batch element.

#include <backward/parts/row_stats.cuh>
#include <tile/tensor.cuh>

struct StatsInMemory {
  Tensor<const real> lse, delta;
  int batch;

  __device__ __forceinline__ RowStats operator()(int head, int row) const {
    return row_stats(*lse.row(batch, head, row), *delta.row(batch, head, row));
  }
  __device__ __forceinline__ LseAndDelta exact(int head, int row) const {
    return {*lse.row(batch, head, row), *delta.row(batch, head, row)};
  }
};
