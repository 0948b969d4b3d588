// classify_tiles: the states of a block mask's tiles. A tile is empty (0), partial (1) or full (2).
//
// A block evaluates the mask's text for the pairs of a tile until it has met one that is seen and
// one that is hidden: then the tile is partial. So empty and full tiles are found from all pairs.
//
//   states, numbers [count]: numbers of tiles among [batch, heads, cdiv(M, rows), cdiv(N, keys)]
//   grid (count)    block (threads)
//   the host sets: rows, keys, heads, threads and options (score.cuh)
#include <attention/extent.cuh>

extern "C" __global__ __launch_bounds__(threads) void classify_tiles(unsigned char* states,
                                                                     const long long* numbers,
                                                                     Sizes sizes, Mods mods) {
  const int across = cdiv(sizes.N, keys), tiles = cdiv(sizes.M, rows) * across;
  const long long number = numbers[blockIdx.x];
  const int tile = number % tiles, head = number / tiles % heads, batch = number / tiles / heads;
  const Extent extent = extent_of(sizes, mods, batch, head);
  const int first_row = tile / across * rows, first_key = tile % across * keys;
  const int width = min(keys, sizes.N - first_key);
  const int pairs = min(rows, sizes.M - first_row) * width;
  bool some = false, all = true;
  for (int first = 0; first < pairs && (all || !some); first += 8 * threads) {
    bool seen = false, hidden = false;
    for (int i = first + threadIdx.x; i < min(first + 8 * threads, pairs); i += threads) {
      const bool shown = extent.shown(first_row + i / width, first_key + i % width);
      seen |= shown;
      hidden |= !shown;
    }
    some |= bool(__syncthreads_or(seen));
    all &= !__syncthreads_or(hidden);
  }
  if (threadIdx.x == 0) states[blockIdx.x] = all ? 2 : some;
}
