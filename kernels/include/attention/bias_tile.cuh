#pragma once
// A tile of a bias in shared memory: none here. Where scores are modified, the host puts
// kernels/with/attention/bias_tile.cuh in place of this header.

#include <attention/no_bias.cuh>

template <int bytes, int n>
using StagedBias = NoBias;
template <int bytes, int n>
using StagedBiasColumns = NoBias;

template <class Staged, int warps>
struct OfWarps {
  __device__ __forceinline__ NoBias own() { return {}; }
};
