#pragma once
// The dynamic tile scheduler of ragged batches. One warp of a block takes tiles of Q from a counter
// in global memory, longest first (ragged_order.cuh), and passes them to the other warps.

#include <attention/ragged_order.cuh>
#include <attention/row_tile.cuh>
#include <ptx/dependent_launch.cuh>
#include <tile/pipeline.cuh>

// Tiles on their way to the producer and the consumers, with the sizes of their sequences. Blocks
// take tiles late, so that they end together, but Q and K have to arrive before they are needed.
struct alignas(256) TileTasks {
  static constexpr int depth = 3, ahead = 3;
  RowTile tasks[depth];  // after the last one, kv_end is 0
  Sizes sizes[depth];
  Pipeline<depth> pipeline;
  Barrier wanted;  // the producer arrives for each tile of more than `ahead` key tiles

  __device__ __forceinline__ void init() {
    pipeline.init(threads - warpgroup_size);  // all threads of consumers
    init_barrier(wanted, 1);
  }
};

// A tile of Q for the producer, which asks for the next one when `ahead` key tiles are left.
struct LoadedTile : RowTile {
  Barrier& wanted;

  template <int keys>
  __device__ __forceinline__ int after(int first_key) const {
    const int next = RowTile::after<keys>(first_key), soon = kv_end - TileTasks::ahead * keys;
    if (first_key < soon && next >= soon) arrive(wanted);
    return next;
  }
};

template <int Br, int Bc>
struct RaggedSchedule {
  using Queue = TileTasks;
  const Sizes& sizes;
  const Mods& mods;
  Queue& queue;
  const int &heads, &batch;
  PipelineState<Queue::depth> place = {Queue::depth - 1, 1};  // before the first
  bool is_begun = false;

  // The kernel makes barriers visible after this.
  __device__ __forceinline__ RaggedSchedule(const Sizes& sizes, const Mods& mods, const int& heads,
                                            const int& batch, Queue& queue)
      : sizes(sizes), mods(mods), queue(queue), heads(heads), batch(batch) {
    if (threadIdx.x == 0) queue.init();
  }

  // Advances to the block's next tile of Q; returns false if there is none. Consumers leave the
  // current one; the producer has copied it.
  __device__ __forceinline__ bool advance() {
    if (threadIdx.x >= warpgroup_size && is_begun) leave();
    is_begun = true;
    place.advance();
    queue.pipeline.wait(place);
    return queue.tasks[place.stage].kv_end > 0;
  }
  __device__ __forceinline__ LoadedTile task() const {
    return {queue.tasks[place.stage], queue.wanted};
  }

  template <int rows>
  __device__ __forceinline__ int own_end(const RowTile& task, int warpgroup, int most) const {
    if constexpr (!causal) return task.kv_end;
    const Sizes& sizes = queue.sizes[place.stage];
    const int end = min(task.row + (warpgroup + 1) * rows, sizes.M);
    const int own = min(sizes.N, end + sizes.causal_offset);
    return max(max(own, task.kv_end - most * Bc), task.kv_begin + 1);
  }

  // Runs in one warp, which takes tiles and passes them on.
  __device__ __forceinline__ void take_tiles(int* taken) const {
    if (threadIdx.x / warp_size != 1) return;
    const RaggedOrder<Br, false> order(sizes, mods, heads, batch);
    const int all = order.of_head * heads;
    PipelineState<Queue::depth> next;
    int phase = 0;
    for (int index = blockIdx.x;; index = take(taken)) {
      Place found;
      while (index < all && !order.find(index, mods, found)) index = take(taken);
      const int keys = pass_on(next, found, index < all);
      if (index >= all) break;
      next.advance();
      queue.pipeline.acquire(next);
      if (keys <= Queue::ahead * Bc) continue;
      wait(queue.wanted, phase);
      phase ^= 1;
    }
    wait_for_launch_before();  // every block must wait
  }

 private:
  __device__ __forceinline__ void leave() {
    wait_for_launch_before();  // the previous launch writes other rows of O and lse
    queue.pipeline.arrive(place);
  }

  __device__ __forceinline__ static int take(int* taken) {
    int index = 0;
    if (threadIdx.x % warp_size == 0) {
      wait_for_launch_before();  // the previous launch clears the counter
      index = gridDim.x + atomicAdd(taken, 1);
    }
    return __shfl_sync(full_warp, index, 0);
  }

  // Passes a tile on, or that there is none. Returns the number of keys that it sees.
  __device__ __forceinline__ int pass_on(PipelineState<Queue::depth> next, const Place& found,
                                         bool has_task) const {
    RowTile task = {};
    if (has_task) {
      const Extent extent = extent_of(sizes, mods, found.batch);
      task = row_tile<Br, Bc>(extent, (cdiv(extent.M, Br) - 1 - found.tile) * Br, found.head,
                              found.batch);
      if (extent.N == 0) task.kv_begin = Bc;  // a hidden tile, aligned for bias copies
      task.kv_end = max(task.kv_end, task.kv_begin + 1);
      if (threadIdx.x % warp_size == 0) queue.sizes[next.stage] = extent;
    }
    if (threadIdx.x % warp_size == 0) {
      queue.tasks[next.stage] = task;
      arrive(queue.pipeline.full[0][next.stage]);
    }
    return task.kv_end - task.kv_begin;
  }
};
