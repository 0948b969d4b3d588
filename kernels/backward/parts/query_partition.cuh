#pragma once
// Divides dQ of a row tile among the warps of a block.

#include <backward/parts/warp_partition.cuh>

// A warp's part of one column slice of dQ. dK and dV leave too few registers for all of dQ.
template <int height, int depth, int warps, int slices,
          int columns = cdiv(depth, slices* step) * step>
struct QueryPartition : WarpPartition<height, columns, warps> {
  using Base = WarpPartition<height, columns, warps>;
  static constexpr bool whole = Base::whole && columns * slices == depth;

  __device__ __forceinline__ explicit QueryPartition(int slice) {
    this->col += slice * columns;
    this->end = min(this->end + slice * columns, depth);
  }
  __device__ __forceinline__ bool has(int n) const {
    return whole || this->col + n * step < this->end;
  }
};
