#pragma once
// Iterates over the row tiles that see a block's keys and copies their Q, dO and row statistics.

#include <backward/parts/mma_gradients.cuh>
#include <tile/async_copy.cuh>

// Visits the heads in order and the row tiles of each from last to first, so that blocks that start
// together process the same rows even under a causal mask.
template <int Br, int Bc, int d, int dv, int threads>
struct RowTileLoads {
  Tensor<const operand> Q, dO;
  StatsInMemory stats;
  int M, batch, head, first_row, first, last, left;
  const Extent* extent;
  int first_key;

  __device__ __forceinline__ auto map() const {
    return extent_of_head(*extent, head).row_tiles(first_key / Bc);
  }
  // With a block mask: moves to the tile at `row` or, past `last`, to the next of the `left` heads.
  __device__ __forceinline__ void go_to(int row) {
    for (first_row = row; first_row > last; first_row = map().template from<Br>(first)) {
      if (--left == 0) return;
      ++head;
    }
  }
  __device__ __forceinline__ void advance() {
    if constexpr (has_row_tiles) return go_to(map().template after<Br>(first_row));
    --left;
    first_row -= Br;
    if (first_row >= first) return;
    first_row = last;
    ++head;
  }
  // Starts the copies of Q and dO. Head addresses are recomputed to save registers.
  template <class Shared>
  __device__ __forceinline__ void begin_copies(Shared& shared, int stage) const {
    copy_rows<threads, d>(shared.Q[stage], Head(Q, opaque(batch), opaque(head), M), first_row);
    copy_rows<threads, dv>(shared.dO[stage], Head(dO, opaque(batch), opaque(head), M), first_row);
  }
  __device__ __forceinline__ void load_stats(RowLoads<threads, Br>& loads) const {
    loads.load({stats.lse, stats.delta, opaque(batch)}, opaque(head), first_row, M);
  }
};
