#pragma once
// Kept tiles of dS as 16 x 16 squares: the 16 bytes of a lane are its operand A of mma.sync
// (mma.cuh), so a warp reads and writes 512 contiguous bytes.

#include <backward/parts/kept_tiles.cuh>
#include <ptx/pack.cuh>
#include <tile/warp.cuh>

template <int Br, int Bc>
struct KeptSquares : KeptTiles<Br, Bc> {
  static constexpr int down = Br / step, across = Bc / step;
  uint4* chunks;  // [heads of the round, lines, tiles of a line, Br / 16, Bc / 16, 32 lanes]

  __device__ __forceinline__ KeptSquares(operand* dS, const Sizes& sizes)
      : KeptTiles<Br, Bc>(sizes), chunks(reinterpret_cast<uint4*>(dS)) {}

  // Returns a lane's chunk of the square in row i, column j of a tile.
  __device__ __forceinline__ uint4* chunk(int tile, int i, int j, int lane) const {
    return chunks + (((long long)tile * down + i) * across + j) * warp_size + lane;
  }
};

// Rounds the warp's part of dS to 16 bits and keeps it.
template <class Kept, class Own, int m, int n>
__device__ __forceinline__ void keep_dS(const Kept& kept, int tile, const float (&dS)[m][n][4],
                                        const Own& own, int lane) {
  uint4* to = kept.chunk(tile, own.row / step, own.col / step, lane);
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      const float (&left)[4] = dS[i][2 * j], (&right)[4] = dS[i][2 * j + 1];
      const uint4 square = {pack<operand>(left[0], left[1]), pack<operand>(left[2], left[3]),
                            pack<operand>(right[0], right[1]), pack<operand>(right[2], right[3])};
      __stcg(to + (i * Kept::across + j) * warp_size, square);
    }
  }
}
