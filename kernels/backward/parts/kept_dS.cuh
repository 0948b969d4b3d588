#pragma once
// dS of a round of query heads in global memory, written by the pass for dK and dV, read by the
// one for dQ.
//
// Br x Bc tiles are stored as 16 x 16 squares: the 16 bytes of a lane are its operand A of
// mma.sync (mma.cuh), so a warp reads and writes 512 contiguous bytes.

#include <attention/batch.cuh>
#include <ptx/pack.cuh>
#include <tile/math.cuh>
#include <tile/warp.cuh>

// Under a causal mask the tiles of rows that see many keys share a line with those of rows that see
// few, from the other end: row tile r with the r-th last. So no memory is kept for hidden tiles.
template <int Br, int Bc>
struct KeptTiles {
  static constexpr int down = Br / step, across = Bc / step;

  uint4* chunks;  // [heads of the round, lines, tiles of a line, Br / 16, Bc / 16, 32 lanes]
  int row_tiles, lines, line_tiles;

  __device__ __forceinline__ KeptTiles(operand* dS, const Sizes& sizes)
      : chunks(reinterpret_cast<uint4*>(dS)),
        row_tiles(cdiv(sizes.M, Br)),
        lines(causal ? cdiv(row_tiles, 2) : row_tiles),
        line_tiles(cdiv(sizes.N, Bc)) {
    if constexpr (!causal) return;
    // Both row tiles of a line see fewer than this many tiles of keys; see line_tiles() of the
    // host.
    const long long both = ((row_tiles + 1LL) * Br + 2LL * sizes.causal_offset - 2 + 2LL * Bc) / Bc;
    line_tiles = int(max((long long)line_tiles, min(2LL * line_tiles, both)));
  }

  __device__ __forceinline__ int tile(int head, int row_tile, int key_tile) const {
    int line = row_tile, place = key_tile;
    if (causal && row_tile >= lines) {
      line = row_tiles - 1 - row_tile;
      place = line_tiles - 1 - key_tile;
    }
    return (head * lines + line) * line_tiles + place;
  }
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
