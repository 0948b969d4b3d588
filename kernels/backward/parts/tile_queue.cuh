#pragma once
// The dynamic tile scheduler of persistent blocks. A block starts with tile blockIdx.x. One warp
// fetches further indices from an atomic counter in global memory shortly before they are needed,
// and passes them to the other warps. Tiles start in the same order as with one block per tile.

#include <ptx/dependent_launch.cuh>
#include <tile/pipeline.cuh>

struct TileQueue {
  static constexpr int depth = 2;
  int numbers[depth];
  Pipeline<depth> pipeline;  // each warp that reads a tile number arrives once
};

// Iterates over the block's tiles, out of `all`. The tile index is warp-uniform: otherwise the
// compiler treats the loop as divergent and keeps wgmma descriptors in vector registers.
struct QueuedTiles {
  TileQueue& queue;
  int all;
  int* counter;  // null in warps that only read the queue
  int number = blockIdx.x;
  bool has_tile = true;
  PipelineState<TileQueue::depth> place = {};

  __device__ __forceinline__ void advance() {
    __syncwarp();
    if (threadIdx.x % warp_size == 0) number = counter ? count() : read();
    number = warp_uniform(number);
    has_tile = number < all;
    place.advance();
  }
  __device__ __forceinline__ int count() {
    wait_for_launch_before();  // the previous launch clears the counter
    const int next = gridDim.x + atomicAdd(counter, 1);
    Barrier& full = queue.pipeline.acquire(place);
    queue.numbers[place.stage] = next;
    arrive(full);
    return next;
  }
  __device__ __forceinline__ int read() {
    queue.pipeline.wait(place);
    const int next = queue.numbers[place.stage];
    queue.pipeline.arrive(place);
    return next;
  }
};
