#pragma once
// Gradients of warpgroups that own 64 rows or keys each, and are fed by one more that loads.

#include <ptx/setmaxnreg.cuh>
#include <tile/store.cuh>
#include <tile/tensor.cuh>
#include <tile/warpgroup.cuh>

template <int columns>
using Sums = float[columns / 2];  // of a product of 64 rows
template <int columns>
using Operands = unsigned[columns / step][4];  // the same in 16 bits, as operands of products

constexpr int consumers = 2;  // warpgroups
constexpr int consuming_threads = consumers * warpgroup_size;
// Registers of a thread: the consumers have all but a few.
constexpr int producer_registers = 24, consumer_registers = 240;

// Writes the warp's 16 rows of a gradient, times a factor, 16 bytes at a time where rows lie so:
// all columns of `sums`, from column first_col on, as far as there are `columns`.
template <int columns, int count>
__device__ __forceinline__ void store_gradient(const float (&sums)[count], float factor, int first,
                                               Tensor<scalar> gradient, int batch, int head,
                                               int end, int lane, int first_col = 0) {
  const bool aligned = is_aligned(gradient);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned pairs[count / 4];
#pragma unroll
    for (int n = 0; n < count / 4; ++n)
      pairs[n] = pack<scalar>(sums[4 * n + 2 * half] * factor, sums[4 * n + 2 * half + 1] * factor);
    const int row = first + lane / 4 + half * 8;
    store_row<columns>(gradient.row(batch, head, row), pairs, first_col, aligned, row < end, lane);
  }
}
