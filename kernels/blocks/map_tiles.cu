// map_tiles: makes the map of a block mask, by which kernels go from tile to tile (tile_map.cuh in
// kernels/with/attention), from the states of its tiles.
//
// A block makes the lines of a batch element and head. A warp goes through a line from its end, 32
// tiles at a time. Then the lines are ordered by their numbers of tiles, the longest first: each
// line counts those before it.
//
//   map [copies, lines, tiles + 2]: the last column has that order
//   states [copies, lines * tiles]: that of tile t of line l is l * line_step + t * tile_step
//   counts [copies, lines]
//   alone: whether full tiles are known to be full; else all are partial
//   grid (copies)    block (threads)
#include <tile/warp.cuh>

constexpr int full = 2;

extern "C" __global__ __launch_bounds__(threads) void map_tiles(int* map,
                                                                const unsigned char* states,
                                                                int* counts, int lines, int tiles,
                                                                int line_step, int tile_step,
                                                                int alone) {
  const int lane = threadIdx.x % warp_size, width = tiles + 2;
  map += (long long)blockIdx.x * lines * width;
  states += (long long)blockIdx.x * lines * tiles;
  counts += (long long)blockIdx.x * lines;
  for (int line = threadIdx.x / warp_size; line < lines; line += threads / warp_size) {
    int* to = map + (long long)line * width;
    int next = 2 * tiles, count = 0;
    for (int first = (tiles - 1) / warp_size * warp_size; first >= 0; first -= warp_size) {
      const int tile = first + lane;
      const long long at = (long long)line * line_step + (long long)tile * tile_step;
      const int state = tile < tiles ? states[at] : 0;
      const unsigned some = __ballot_sync(full_warp, state != 0);
      const unsigned partial = __ballot_sync(full_warp, !alone || state != full);
      const auto element = [&](unsigned from) {  // the first tile from here on that is not empty
        const int n = __ffs(from) - 1;
        return from == 0 ? next : 2 * (first + n) + int(partial >> n & 1);
      };
      if (tile < tiles) to[tile] = element(some & ~0u << lane);
      next = element(some);
      count += __popc(some);
    }
    if (lane == 0) to[tiles] = 2 * tiles, counts[line] = count;
  }
  __syncthreads();
  for (int line = threadIdx.x; line < lines; line += threads) {
    const int own = counts[line];
    int before = 0;
    for (int other = 0; other < lines; ++other) {
      const int count = counts[other];
      before += count > own || (count == own && other < line);
    }
    map[(long long)before * width + tiles + 1] = line;
  }
}
