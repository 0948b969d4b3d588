#pragma once
// wgmma gradients with split float32 operands, shared by the dK/dV pass and the dQ pass.

#include <backward/parts/gradient_warpgroups.cuh>
#include <backward/parts/split_f32/split_gradients.cuh>
#include <backward/parts/split_f32/box_pipelines.cuh>
#include <ptx/opaque.cuh>

// Pads the columns of accumulators. Above 192, ptxas spills accumulators of any width but 256.
constexpr int padded_columns(int columns) {
  return columns > 192 ? 256 : cdiv(columns, step) * step;
}
template <int columns>
using SplitSums = float[1][columns / 8][4];  // accumulators of a 64-row product

// Returns the warp's first row or key within its warpgroup.
__device__ __forceinline__ int own_first() {
  return opaque(int(threadIdx.x)) / warp_size % 4 * step;
}

// Computes P of a tile; tests the positions of pairs only if a pair of the tile may be hidden.
template <bool of_keys, int n, int rows, int keys>
__device__ __forceinline__ void compute_P_of_tile(float (&S)[1][n][4], float (&PS)[1][n][4],
                                                  const SplitStats (&stats)[rows],
                                                  const OwnScores<of_keys>& own,
                                                  const TilePair<rows, keys>& pair,
                                                  const Scorer<float>& scorer) {
  if (pair.is_whole() && pair.reaches_all())
    compute_P<false>(S, PS, stats, own, pair, scorer);
  else
    compute_P<true>(S, PS, stats, own, pair, scorer);
}

// Adds weights * B of a tile to `sums` and calls read(i, is_last) after the last read of box i of
// B.
template <int n, int columns, int all_rows, int width, class Read>
__device__ __forceinline__ void add_weighted(float (&weights)[1][n][4], Largest<1>& largest,
                                             const TmaTile<operand, all_rows, columns>& B,
                                             float (&sums)[1][width][4], Read read) {
  float factor[1][2];
  SplitOperands<8 * n> high, low;
  largest.raise(weights, factor);
  split_operands(weights, high, low);
  add_split_products(B, high, low, factor, sums, [](int, bool) {}, read);
}
