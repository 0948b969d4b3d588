#pragma once
// Passes for keys of warpgroups whose operands are parts in float16: what is loaded, and which
// scores a thread has.

#include <backward/parts/gradient_parts.cuh>
#include <backward/parts/own_keys.cuh>
#include <backward/parts/part_keys.cuh>
#include <ptx/bulk_copy.cuh>

// Which scores of a tile the thread has. Its warpgroup's keys begin with first_key.
__device__ __forceinline__ OwnScores<true> own_scores(int first_key) {
  const int lane = opaque(int(threadIdx.x)) % warp_size;
  return {2 * (lane % 4), first_key + own_first() + lane / 4};
}

// The producer's thread loads K and V and, tile by tile, Q, stats of rows and dO.
template <int stages, int Br, int Bc, class Shared>
__device__ __forceinline__ void produce_rows(Shared& shared, const KeyTile<Br, Bc>& task,
                                             const PartMaps& Q, const PartMaps& K,
                                             const PartMaps& V, const PartMaps& dO,
                                             const PartStats* stats) {
  if (task.first_row >= task.end_row) return;
  const int batch = task.extent.packed_batch(task.batch);
#pragma unroll
  for (int i = 0; i < Bc / warpgroup_rows; ++i) {
    const int key = task.extent.packed_key(task.first_key + i * warpgroup_rows);
    load_parts(shared.K[i], K, shared.K_pipeline.full[0][0], key, task.kv_head, batch);
    load_parts(shared.V[i], V, shared.V_pipeline.full[0][0], key, task.kv_head, batch);
  }
  PipelineState<stages> rows;
  task.for_tiles([&](int head, int row, long long tile) {
    const int first = task.extent.packed_row(row);
    Barrier& full = shared.Q_pipeline.acquire(rows);
    load_parts(shared.Q[rows.stage], Q, full, first, head, batch);
    arrive_expect_tx(full, sizeof(PartStats) * Br);
    bulk_load(shared.stats[rows.stage], stats + tile * Br, sizeof(PartStats) * Br, full);
    load_parts(shared.dO[rows.stage], dO, shared.dO_pipeline.acquire(rows), first, head, batch);
    rows.advance();
  });
}
