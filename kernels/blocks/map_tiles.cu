// map_tiles: builds the map of a block mask from the states of its tiles. Kernels use it to skip to
// the next tile that is not empty (tile_map.cuh in kernels/with/attention).
//
// A block builds the lines of one batch element and head. A warp scans a line from its end, 32
// tiles at a time. Then the lines are sorted by their number of tiles, longest first: the position
// of a line is the number of lines before it.
//
//   map [copies, lines, tiles + 2]: the last column lists the lines in sorted order
//   states [copies, lines * tiles]: tile t of line l is element l * line_step + t * tile_step
//   counts [copies, lines]
//   alone: whether full tiles are marked as full; otherwise they are marked as partial
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
      const auto element = [&](unsigned from) {  // first non-empty tile from here on
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
