#pragma once
// Gradients of warpgroups that own 64 rows or keys each; one more warpgroup loads for them.

#include <ptx/pack.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/warp.cuh>
#include <tile/warpgroup.cuh>

template <int columns>
using Sums = float[columns / 2];  // accumulators of a product of 64 rows
template <int columns>
using Operands = unsigned[columns / step][4];  // the same sums in 16 bits, as operands

// Returns accumulators as fragments of 16 rows (mma.cuh).
template <int count>
__device__ __forceinline__ const float (&fragments(const float (&sums)[count]))[1][count / 4][4] {
  return reinterpret_cast<const float (&)[1][count / 4][4]>(sums);
}

constexpr int consumers = 2;  // warpgroups
constexpr int consuming_threads = consumers * warpgroup_size;
// Registers for each thread: the consumers get all but a few.
constexpr int producer_registers = 24, consumer_registers = 240;
