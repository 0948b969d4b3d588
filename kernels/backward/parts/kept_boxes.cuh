#pragma once
// dS of a round of query heads in global memory, for wgmma: boxes of 64 rows and 64 keys.
//
// The first pass holds dS^T as operand A of wgmma (wgmma.cuh). Each register of a warp is an 8 x 8
// matrix of 8 keys and 8 rows, stored as it is held: 128 contiguous bytes, word l of lane l. The
// second pass copies whole boxes, and ldmatrix.trans transposes the matrices to operands of dS.

#include <backward/parts/gradient_warpgroups.cuh>
#include <backward/parts/kept_tiles.cuh>
#include <ptx/mma.cuh>

constexpr int box_rows = warpgroup_rows, box_keys = 64;

struct alignas(16) KeptBox {
  unsigned matrices[box_keys / 8][box_rows / 8][warp_size];

  // Loads 16 rows, starting at first_row, and all keys as operand A.
  __device__ __forceinline__ void load(Operands<box_keys>& dS, int first_row, int lane) const {
#pragma unroll
    for (int i = 0; i < box_keys / step; ++i) {
      const auto& own = matrices[2 * i + lane / 16][first_row / 8 + lane / 8 % 2];
      ldmatrix_trans(dS[i], SharedAddress(&own[lane % 8 * 4]));
    }
  }
};

struct KeptBoxes : KeptTiles<box_rows, box_keys> {
  KeptBox* boxes;  // [heads of the round, lines, boxes of a line]

  __device__ __forceinline__ KeptBoxes(scalar* dS, const Sizes& sizes)
      : KeptTiles(sizes), boxes(reinterpret_cast<KeptBox*>(dS)) {}

  __device__ __forceinline__ KeptBox& box(int head, int row, int key) const {
    return boxes[tile(head, row / box_rows, key / box_keys)];
  }
  // Returns the end of the keys that rows of the box at `row` see; 0 past the last row. Only boxes
  // that begin before it are stored.
  template <class Extent>
  static __device__ __forceinline__ int end_of_keys(const Extent& extent, int row) {
    return row < extent.M ? extent.kv_end(min(row + box_rows, extent.M) - 1) : 0;
  }
};
