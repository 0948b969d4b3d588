#pragma once
// Iterates over row tiles with split Q and dO, for a block that owns a key tile.

#include <backward/parts/row_tile_iterator.cuh>
#include <backward/parts/split_f32/load_split_stats.cuh>
#include <forward/parts/split_f32/split_head.cuh>
#include <ptx/opaque.cuh>

template <int threads, int Br, int Bc, int depth, int width>
struct SplitRowIterator : RowTileIterator<Br, Bc> {
  Tensor<const operand> Q_high, Q_low, dO_high, dO_low;
  SplitStatsInMemory stats;
  int M;

  // Starts the copy of Q. Head addresses are recomputed to save registers.
  __device__ __forceinline__ void begin_Q(operand (&Q)[2][Br][depth]) const {
    SplitHead<depth>(Q_high, Q_low, opaque(stats.batch), opaque(this->head), M)
        .template copy<threads>(Q, this->first_row);
  }
  __device__ __forceinline__ void begin_dO(operand (&dO)[2][Br][width]) const {
    SplitHead<width>(dO_high, dO_low, opaque(stats.batch), opaque(this->head), M)
        .template copy<threads>(dO, this->first_row);
  }
  __device__ __forceinline__ void load_stats(SplitStatsLoads<threads, Br>& loads) const {
    loads.load(stats, opaque(this->head), this->first_row, M);
  }
};
