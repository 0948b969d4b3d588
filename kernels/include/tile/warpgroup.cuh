#pragma once
// The accumulators of warpgroups that own 64 rows each, 16 per warp.

constexpr int warpgroup_rows = 64;

// Returns a warp's S or O (row_state.cuh) as a flat array, which the wgmma functions expect.
template <int blocks>
__device__ __forceinline__ float (&flat(float (&fragments)[1][blocks][4]))
    [blocks * 4] { return reinterpret_cast<float (&)[blocks * 4]>(fragments); }
