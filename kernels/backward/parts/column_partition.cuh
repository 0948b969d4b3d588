#pragma once
// Divides the columns of dQ = dS K between two warpgroups.

#include <backward/parts/add_dQ.cuh>

// Returns the first part of dQ that a warpgroup computes. If the number of parts is odd, the second
// warpgroup gets one part fewer, because its other products take longer.
template <class Layout>
__device__ __forceinline__ constexpr int first_part(int warpgroup) {
  return warpgroup < consumers ? warpgroup * cdiv(Layout::count, 2) : Layout::count;
}

template <class Layout, int warpgroup>
struct ColumnPartition {
  static constexpr int first = first_part<Layout>(warpgroup);
  static constexpr int count = first_part<Layout>(warpgroup + 1) - first;
  Sums<(count > 0 ? count : 1) * Layout::width> dQ;

  // Starts the warpgroup's part of dQ = dS K.
  template <int Br, int Bc, int d>
  __device__ __forceinline__ void begin(const TmaTile<scalar, Br, Bc>& dS,
                                        const TmaTile<scalar, Bc, d>& K) {
    if constexpr (count > 0) begin_dQ<Bc>(dS, K, dQ, 0, 0, first);
  }

  // Waits until at most `pending` wgmma groups are in flight, then hands the parts one by one to
  // the warp that adds them to global memory.
  template <int pending>
  __device__ __forceinline__ void pass(RegisterTile<Layout::width>& part) {
    if constexpr (count > 0) wgmma_wait_group<pending>(dQ);
#pragma unroll
    for (int i = 0; i < count; ++i) pass_part(dQ, part, warpgroup, i * Layout::width / 2);
  }
};
