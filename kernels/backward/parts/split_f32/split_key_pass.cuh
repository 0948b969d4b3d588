#pragma once
// Tile loads and thread positions of the wgmma pass for dK and dV with split operands.

#include <backward/parts/key_tile.cuh>
#include <backward/parts/split_f32/split_gradients_wgmma.cuh>
#include <backward/parts/split_f32/store_split_dK_dV.cuh>
#include <ptx/bulk_copy.cuh>

// Returns the positions of the thread's scores. The keys of its warpgroup start at first_key.
__device__ __forceinline__ OwnScores<true> own_scores(int first_key) {
  const int lane = opaque(int(threadIdx.x)) % warp_size;
  return {2 * (lane % 4), first_key + own_first() + lane / 4};
}

// The elected producer thread loads K and V once, then Q, row statistics and dO tile by tile. With
// the first tile, boxes arrive in the order in which products read them.
template <int stages, int Br, int Bc, class Shared>
__device__ __forceinline__ void produce_rows(Shared& shared, const KeyTile<Br, Bc>& task,
                                             const SplitMaps& Q, const SplitMaps& K,
                                             const SplitMaps& V, const SplitMaps& dO,
                                             const SplitStats* stats) {
  if (task.first_row >= task.end_row) return;
  const int batch = task.extent.packed_batch(task.batch);
  const auto load_keys = [&](int i) {
#pragma unroll
    for (int j = 0; j < Bc / warpgroup_rows; ++j) {
      const int key = task.extent.packed_key(task.first_key + j * warpgroup_rows);
      if (i < shared.V_pipeline.count)
        shared.V_pipeline.load(shared.V[j], i, V, {}, key, task.kv_head, batch);
      if (i < shared.K_pipeline.count)
        shared.K_pipeline.load(shared.K[j], i, K, {}, key, task.kv_head, batch);
    }
  };
  bool begun = false;
  PipelineState<stages> rows;
  task.for_tiles([&](int head, int row, long long tile) {
    const int first = task.extent.packed_row(row);
    Barrier& full = shared.stats_pipeline.acquire(rows);
    arrive_expect_tx(full, sizeof(SplitStats) * Br);
    bulk_load(shared.stats[rows.stage], stats + tile * Br, sizeof(SplitStats) * Br, full);
    // Loads boxes in the order in which they become free.
#pragma unroll
    for (int i = 0; i < max(shared.Q_pipeline.count, shared.dO_pipeline.count); ++i) {
      if (!begun) load_keys(i);
      if (i < shared.dO_pipeline.count)
        shared.dO_pipeline.load(shared.dO[rows.stage], i, dO, rows, first, head, batch);
      if (i < shared.Q_pipeline.count)
        shared.Q_pipeline.load(shared.Q[rows.stage], i, Q, rows, first, head, batch);
    }
    begun = true;
    rows.advance();
  });
}
