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

// The elected producer thread loads K and V once, then Q, row statistics and dO tile by tile.
template <int stages, int Br, int Bc, class Shared>
__device__ __forceinline__ void produce_rows(Shared& shared, const KeyTile<Br, Bc>& task,
                                             const SplitMaps& Q, const SplitMaps& K,
                                             const SplitMaps& V, const SplitMaps& dO,
                                             const SplitStats* stats) {
  if (task.first_row >= task.end_row) return;
  const int batch = task.extent.packed_batch(task.batch);
#pragma unroll
  for (int i = 0; i < Bc / warpgroup_rows; ++i) {
    const int key = task.extent.packed_key(task.first_key + i * warpgroup_rows);
    load_split(shared.K[i], K, shared.K_pipeline.full[0][0], key, task.kv_head, batch);
    load_split(shared.V[i], V, shared.V_pipeline.full[0][0], key, task.kv_head, batch);
  }
  PipelineState<stages> rows;
  task.for_tiles([&](int head, int row, long long tile) {
    const int first = task.extent.packed_row(row);
    Barrier& full = shared.Q_pipeline.acquire(rows);
    load_split(shared.Q[rows.stage], Q, full, first, head, batch);
    arrive_expect_tx(full, sizeof(SplitStats) * Br);
    bulk_load(shared.stats[rows.stage], stats + tile * Br, sizeof(SplitStats) * Br, full);
    load_split(shared.dO[rows.stage], dO, shared.dO_pipeline.acquire(rows), first, head, batch);
    rows.advance();
  });
}
