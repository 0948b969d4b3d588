// classify_tiles: classifies the tiles of a block mask as empty (0), partial (1) or full (2).
//
// A block evaluates the mask expression for the pairs of one tile. It stops when it has found both
// a visible and a hidden pair: then the tile is partial. For an empty or a full tile, it evaluates
// all pairs. Each thread keeps its key while it iterates over rows, so that array elements indexed
// by the key are loaded once.
//
//   states [batch, heads, cdiv(M, rows), cdiv(N, keys)]
//   grid (number of states)    block (threads)
//   the host sets: rows, keys, heads, threads and options (extent.cuh)
#include <attention/extent.cuh>

constexpr int rows_at_once = keys < threads ? threads / keys : 1;
constexpr int steps = 16;  // rows per thread between checks for an early exit

extern "C" __global__ __launch_bounds__(threads) void classify_tiles(unsigned char* states,
                                                                     Sizes sizes, Mods mods) {
  const int across = cdiv(sizes.N, keys), tiles = cdiv(sizes.M, rows) * across;
  const int tile = blockIdx.x % tiles, head = blockIdx.x / tiles % heads;
  const int batch = blockIdx.x / tiles / heads;
  const Extent extent = extent_of(sizes, mods, batch, head);
  const int first_row = tile / across * rows, first_key = tile % across * keys;
  const int last_row = min(first_row + rows, sizes.M) - 1;
  const int last_key = min(first_key + keys, sizes.N) - 1;
  bool some = false, all = true;
  for (int row = first_row; row <= last_row && (all || !some); row += steps * rows_at_once) {
    bool seen = false, hidden = false;
#pragma unroll
    for (int first = 0; first < keys; first += threads) {
      const int key = min(first_key + first + int(threadIdx.x) % keys, last_key);
#pragma unroll
      for (int i = 0; i < steps; ++i) {  // rows past the end repeat the last row
        const int own = row + i * rows_at_once + int(threadIdx.x) / keys;
        const bool shown = extent.shown(min(own, last_row), key);
        seen |= shown;
        hidden |= !shown;
      }
    }
    some |= bool(__syncthreads_or(seen));
    all &= !__syncthreads_or(hidden);
  }
  if (threadIdx.x == 0) states[blockIdx.x] = all ? 2 : some;
}
