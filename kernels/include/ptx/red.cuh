#pragma once
// Atomic sums in global memory. Their layout ignores rows and columns: neighbouring threads of a
// warp add to neighbouring floats.

// From sm_90 on each thread adds four floats with one instruction. On earlier devices, and for
// doubles, it adds one number at a time, next to the number of the neighbouring thread.
constexpr bool sums_by_fours = __CUDA_ARCH__ >= 900 && sizeof(real) == 4;

// Returns the index, among a block's sums, of element e of a thread's n-th group of four.
template <int threads>
__device__ __forceinline__ int place_of_sum(int n, int e) {
  const int thread = threadIdx.x;
  return sums_by_fours ? (n * threads + thread) * 4 + e : (n * 4 + e) * threads + thread;
}

// Adds to a thread's n-th group of four.  PTX: red.global.add.v4.f32, or .f32 before sm_90
template <int threads>
__device__ __forceinline__ void add_four(real* sums, int n, const real (&more)[4]) {
  if constexpr (sums_by_fours) {
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(
                     __cvta_generic_to_global(sums + place_of_sum<threads>(n, 0))),
                 "f"(float(more[0])), "f"(float(more[1])), "f"(float(more[2])), "f"(float(more[3]))
                 : "memory");
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) atomicAdd(sums + place_of_sum<threads>(n, e), more[e]);
  }
}
