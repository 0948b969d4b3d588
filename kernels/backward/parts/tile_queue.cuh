#pragma once
// The dynamic tile scheduler of a persistent block. Its first tile has the block's own number. The
// next ones come from an atomic counter in memory just before the block is free, in the order in
// which blocks with one tile would begin. One warp counts, and passes the numbers to the others.

#include <ptx/dependent_launch.cuh>
#include <tile/pipeline.cuh>

struct TileQueue {
  static constexpr int depth = 2;
  int numbers[depth];
  Pipeline<depth> pipeline;  // its consumers are warps
};

// Iterates over a warp's tiles, out of `all`. The tile number is warp-uniform: otherwise the
// compiler treats the loop as divergent, and descriptors of products take vector registers.
struct QueuedTiles {
  TileQueue& queue;
  int all;
  int* counter;  // of the warp that counts
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
    wait_for_launch_before();  // which clears the counter
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
