#pragma once
// Producer warps for consumer warpgroups that own keys. One warp loads K, Q and row sums, another V
// and dO. Key tiles that no row sees are skipped. task_of(number) returns a KeyTile.

#include <backward/parts/transposed_softmax.cuh>
#include <ptx/bulk_copy.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/named_barrier.cuh>
#include <tile/pipeline.cuh>

constexpr int reading_threads = consuming_threads + warp_size;

// Iterates over the single key tile of a block that is not persistent.
struct OneTile {
  int number = blockIdx.x;
  bool has_tile = true;

  __device__ __forceinline__ void advance() { has_tile = false; }
};

// Loads K, Q and the row sums with one warp; an elected thread issues the copies. One consumer
// thread releases Q while others may still read row sums. The warp therefore also waits at the
// named barrier sums_read + stage, where all readers arrive. K and the first Q are in flight while
// the previous launch still computes row sums.
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
        if (begun == 1) wait_for_launch_before();  // the previous launch writes the row sums
        arrive_expect_tx(full, sizeof(RowSums<Br>));
        bulk_load(&shared.sums[rows.stage], row_sums + tile, sizeof(RowSums<Br>), full);
      }
      rows.advance();
    });
  }
}

// Loads V and dO with another warp. Kernels that compute dQ release dO earlier than Q.
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
