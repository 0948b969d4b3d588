#pragma once
// Two warps load tiles for warpgroups that own keys: K and V of each tile of keys that some row
// sees, and Q, dO and row sums, tile by tile. task_of() returns the KeyTile with a number.

#include <backward/parts/transposed_softmax.cuh>
#include <ptx/bulk_copy.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/named_barrier.cuh>
#include <tile/pipeline.cuh>

constexpr int reading_threads = consuming_threads + warp_size;

// The only tile of keys of a block that is not persistent.
struct OneTile {
  int number = blockIdx.x;
  bool has_tile = true;

  __device__ __forceinline__ void advance() { has_tile = false; }
};

// A warp loads K, Q and the row sums; one of its threads starts the copies. One thread of a
// warpgroup releases Q, but other threads may still read row sums. So the warp waits for all that
// read them at the named barrier sums_read + stage, where they arrive without waiting. K and the
// first Q are in flight while the previous launch still computes row sums.
template <class Shared, class Tiles, class TaskOf, int Br>
__device__ __forceinline__ void produce_Q(Shared& shared, Tiles tiles, TaskOf task_of,
                                          const TensorMap& Q, const TensorMap& K,
                                          const RowSums<Br>* row_sums, int sums_read) {
  constexpr int stages = sizeof(Shared::Q) / sizeof(Shared::Q[0]);
  const bool elected = elect_one();
  PipelineState<1> keys;
  PipelineState<stages> rows;
  int begun = 0;
#pragma unroll 1
  for (; tiles.has_tile; tiles.advance()) {
    const auto task = task_of(tiles.number);
    if (task.first_row >= task.end_row) continue;
    const int packed = task.extent.packed_batch(task.batch);
    if (elected)
      load_async(shared.K, K, shared.K_pipeline.acquire(keys),
                 task.extent.packed_key(task.first_key), task.kv_head, packed);
    keys.advance();
    task.for_tiles([&](int head, int row, long long tile) {
      __syncwarp();
      if (begun++ >= stages) barrier_sync(sums_read + rows.stage, reading_threads);
      if (elected) {
        Barrier& full = shared.Q_pipeline.acquire(rows);
        load_async(shared.Q[rows.stage], Q, full, task.extent.packed_row(row), head, packed);
        if (begun == 1) wait_for_launch_before();  // which computes the row sums
        arrive_expect_tx(full, sizeof(RowSums<Br>));
        bulk_load(&shared.sums[rows.stage], row_sums + tile, sizeof(RowSums<Br>), full);
      }
      rows.advance();
    });
  }
}

// Another warp loads V and dO; dO is released earlier than Q in kernels that compute dQ.
template <class Shared, class Tiles, class TaskOf>
__device__ __forceinline__ void produce_dO(Shared& shared, Tiles tiles, TaskOf task_of,
                                           const TensorMap& V, const TensorMap& dO) {
  const bool elected = elect_one();
  PipelineState<1> keys;
  PipelineState<sizeof(Shared::dO) / sizeof(Shared::dO[0])> rows;
#pragma unroll 1
  for (; tiles.has_tile; tiles.advance()) {
    const auto task = task_of(tiles.number);
    if (task.first_row >= task.end_row) continue;
    const int packed = task.extent.packed_batch(task.batch);
    if (elected)
      load_async(shared.V, V, shared.V_pipeline.acquire(keys),
                 task.extent.packed_key(task.first_key), task.kv_head, packed);
    keys.advance();
    task.for_tiles([&](int head, int row, long long) {
      if (elected)
        load_async(shared.dO[rows.stage], dO, shared.dO_pipeline.acquire(rows),
                   task.extent.packed_row(row), head, packed);
      rows.advance();
    });
  }
}
