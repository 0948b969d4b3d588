#pragma once
// Keeps dS in global memory for the second pass.

#include <attention/tile_pair.cuh>
#include <backward/parts/kept_boxes.cuh>

struct KeepDS {
  KeptBoxes kept;
  int first_head;  // of the round, counted from the batch element's first head; may be negative

  __device__ __forceinline__ KeepDS(scalar* dS, const Sizes& sizes, int first_head)
      : kept(dS, sizes), first_head(first_head) {}

  // Keeps the warpgroup's dS^T of one row tile.
  template <int steps, int Br, int Bc, class Own>
  __device__ __forceinline__ void operator()(const unsigned (&dS)[steps][4],
                                             const TilePair<Br, Bc>& pair, int head,
                                             const Own& own) const {
    const int key = pair.first_key + own.warpgroup * box_keys;
#pragma unroll
    for (int first = 0; first < Br; first += box_rows) {
      const int row = pair.first_row + first;
      if (key >= KeptBoxes::end_of_keys(pair.extent, row)) continue;
      KeptBox& box = kept.box(head - first_head, row, key);
#pragma unroll
      for (int i = 0; i < box_rows / 4; ++i)
        __stcg(&box.matrices[2 * own.warp + i % 2][i / 2][own.lane],
               dS[first / step + i / 4][i % 4]);
    }
  }
};
