#pragma once
// dQ = dS K of a tile, divided by columns between two warpgroups.

#include <backward/parts/add_dQ.cuh>

// The first part of dQ that a warpgroup computes. The second one's other products take longer, so
// it has the smaller half of an odd number of parts.
template <class Layout>
__device__ __forceinline__ constexpr int first_part(int warpgroup) {
  return warpgroup < consumers ? warpgroup * cdiv(Layout::count, 2) : Layout::count;
}

template <class Layout, int warpgroup>
struct ColumnPartition {
  static constexpr int first = first_part<Layout>(warpgroup);
  static constexpr int count = first_part<Layout>(warpgroup + 1) - first;
  Sums<(count > 0 ? count : 1) * Layout::width> dQ;

  // Begins the products of the warpgroup's parts.
  template <int Br, int Bc, int d>
  __device__ __forceinline__ void begin(const TmaTile<scalar, Br, Bc>& dS,
                                        const TmaTile<scalar, Bc, d>& K) {
    if constexpr (count > 0) begin_dQ<Bc>(dS, K, dQ, 0, 0, first);
  }

  // Waits until at most `pending` groups of products are in flight, and passes the parts, one by
  // one, to the warp that adds them.
  template <int pending>
  __device__ __forceinline__ void pass(RegisterTile<Layout::width>& part) {
    if constexpr (count > 0) wgmma_wait_group<pending>(dQ);
#pragma unroll
    for (int i = 0; i < count; ++i) pass_dQ(dQ, part, warpgroup, i * Layout::width / 2);
  }
};
