#pragma once
// Constants of gradient kernels: two consumer warpgroups with 64 rows or keys each, one producer.

#include <ptx/pack.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/warp.cuh>
#include <tile/warpgroup.cuh>

template <int columns>
using Sums = float[columns / 2];  // accumulators of a 64-row product
template <int columns>
using Operands = unsigned[columns / step][4];  // the same elements as 16-bit operands

// Returns accumulators as 16-row fragments (mma.cuh).
template <int count>
__device__ __forceinline__ const float (&fragments(const float (&sums)[count]))[1][count / 4][4] {
  return reinterpret_cast<const float (&)[1][count / 4][4]>(sums);
}

constexpr int consumers = 2;  // number of consumer warpgroups
constexpr int consuming_threads = consumers * warpgroup_size;
// Registers per thread after setmaxnreg: the consumers get almost all of them.
constexpr int producer_registers = 24, consumer_registers = 240;
