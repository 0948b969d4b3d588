#pragma once
// Sums in float32 of what tensor cores have summed. Of sums of e4m3 these keep 14 bits: a number
// 2^14 times smaller than the sum leaves no trace. The sums of a warpgroup lie in memory, since its
// registers are full. A thread has those of its own fragments, so no barrier is needed.
#include <attention/row_state.cuh>
#include <tile/warp.cuh>

template <int width>  // of O; of 0 there are none
struct FloatSums {
  float4 of_threads[width / 8][warpgroup_size];

  // O + the sums times factors.
  __device__ __forceinline__ void add_to(Fragments<step, width>& O, const float (&factor)[1][2]) {
#pragma unroll
    for (int j = 0; j < width / 8; ++j) {
      const float4 sum = of_threads[j][threadIdx.x % warpgroup_size];
      float (&x)[4] = O[0][j];
      x[0] += sum.x * factor[0][0], x[1] += sum.y * factor[0][0];
      x[2] += sum.z * factor[0][1], x[3] += sum.w * factor[0][1];
    }
  }
  __device__ __forceinline__ void take(const Fragments<step, width>& O) {
#pragma unroll
    for (int j = 0; j < width / 8; ++j) {
      const float (&x)[4] = O[0][j];
      of_threads[j][threadIdx.x % warpgroup_size] = {x[0], x[1], x[2], x[3]};
    }
  }
};
template <>
struct FloatSums<0> {};
