#pragma once
// How the warps of a block divide dQ of a tile of rows.

#include <backward/parts/warp_partition.cuh>

// A warp's part of dQ, which comes in slices of its columns: dK and dV leave few registers.
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
