#pragma once
// The bias tiles of all consumer warps. For a bias that batch elements share, the host may replace
// this header with kernels/keeping/attention/warp_bias.cuh.

// One tile per consumer warp; the four producer warps come first.
template <class Staged, int warps>
struct OfWarps<Staged, warps, true> {
  Staged staged[warps];

  __device__ __forceinline__ Staged& own(int = 0) { return staged[threadIdx.x / warp_size - 4]; }
};
