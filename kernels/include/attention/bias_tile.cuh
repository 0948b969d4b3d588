#pragma once
// The bias tile in shared memory; empty here. For modified scores the host replaces this header
// with kernels/with/attention/bias_tile.cuh.

#include <attention/no_bias.cuh>

template <int bytes, int n>
using StagedBias = NoBias;
template <int bytes, int n>
using StagedBiasColumns = NoBias;

template <class Staged, int warps>
struct OfWarps {
  __device__ __forceinline__ NoBias own(int = 0) { return {}; }
};
