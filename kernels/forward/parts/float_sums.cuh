#pragma once
// Sums in float32 of what tensor cores have summed. Of sums of e4m3 these keep 14 bits: what is
// added loses all bits below, and a number 2^14 times smaller than the sum leaves no trace.
//
// The sums of a warpgroup lie in memory, since its registers are full. Each thread reads and writes
// those of its own fragments, four side by side, so no barrier is needed.
#include <attention/row_state.cuh>
#include <tile/warp.cuh>

template <int width>
using FloatSums = float4[width / 8][warpgroup_size];

// The sums of a block's warpgroups: in shared memory, or in global memory one block after the
// other.
template <int width, int count, bool shared>
struct SumsOfWarpgroups {
  FloatSums<width> sums[count];

  __device__ __forceinline__ float4* of(int warpgroup, float*) { return sums[warpgroup][0]; }
};
template <int width, int count>
struct SumsOfWarpgroups<width, count, false> {
  __device__ __forceinline__ float4* of(int warpgroup, float* memory) {
    return reinterpret_cast<FloatSums<width>*>(memory)[blockIdx.x * count + warpgroup][0];
  }
};

// The sums of a thread's fragments.
template <int width>
struct OwnSums {
  float4* mine = nullptr;         // the first of them; the next one is warpgroup_size further
  float factor[1][2] = {{1, 1}};  // by which sums of the rows have to be multiplied
  bool any = false;

  __device__ __forceinline__ void lie_in(float4* of_warpgroup) {
    mine = of_warpgroup + threadIdx.x % warpgroup_size;
  }
  __device__ __forceinline__ void scale(const float (&by)[1][2]) {
    for (int half = 0; half < 2; ++half) factor[0][half] *= by[0][half];
  }
  // O + the sums.
  __device__ __forceinline__ void add_to(Fragments<step, width>& O) const {
    if (!any) return;
#pragma unroll
    for (int j = 0; j < width / 8; ++j) {
      const float4 sum = mine[j * warpgroup_size];
      float (&x)[4] = O[0][j];
      x[0] += sum.x * factor[0][0], x[1] += sum.y * factor[0][0];
      x[2] += sum.z * factor[0][1], x[3] += sum.w * factor[0][1];
    }
  }
  // Takes O, which may be overwritten then.
  __device__ __forceinline__ void take(Fragments<step, width>& O) {
    add_to(O);
#pragma unroll
    for (int j = 0; j < width / 8; ++j) {
      const float (&x)[4] = O[0][j];
      mine[j * warpgroup_size] = {x[0], x[1], x[2], x[3]};
    }
    for (float& x : factor[0]) x = 1;
    any = true;
  }
};
