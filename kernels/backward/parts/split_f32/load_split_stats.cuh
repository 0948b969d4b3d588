#pragma once
// Loads row statistics for gradients with split operands.

#include <backward/parts/split_f32/split_row_stats.cuh>
#include <tile/share_out_rows.cuh>
#include <tile/tensor.cuh>

constexpr float not_a_number = __builtin_bit_cast(float, 0x7fffffff);

// Reads the statistics of any row of one batch element.
struct SplitStatsInMemory {
  Tensor<const real> lse, delta, scale2, dO_units;
  Tensor<const unsigned char> flags;
  int batch;

  __device__ __forceinline__ SplitStats operator()(int head, int row) const {
    const float sum = *lse.row(batch, head, row);
    const bool flagged = *flags.row(batch, head, row) != 0 || fabs(sum) >= 0x1p25f;
    SplitStats own = {sum * log2e, *scale2.row(batch, head, row), *delta.row(batch, head, row),
                      *dO_units.row(batch, head, row)};
    own.delta *= 1LL << dS_exponent;
    if (flagged) own.lse2 = not_a_number, own.delta = 0;
    if (sum == -infinity) own.lse2 = infinity;
    return own;
  }
};

// Loads the statistics of a tile's rows from global memory and stores them in shared memory.
template <int threads, int rows>
struct SplitStatsLoads {
  SplitStats stats[cdiv(rows, threads)];

  __device__ __forceinline__ void load(const SplitStatsInMemory& from, int head, int first_row,
                                       int M) {
    share_out_rows<threads, rows, 1>([&](int i, int, int turn) {
      stats[turn] = first_row + i < M ? from(head, first_row + i) : SplitStats{infinity, 0, 0, 0};
    });
  }
  __device__ __forceinline__ void store(SplitStats (&to)[rows]) const {
    share_out_rows<threads, rows, 1>([&](int i, int, int turn) { to[i] = stats[turn]; });
  }
};
