#pragma once
// Accumulates dQ = dS K in global memory. A consumer warpgroup writes its part to shared memory and
// continues, while another warp issues a TMA reduce-add of the part.

#include <backward/parts/query_layout.cuh>
#include <backward/parts/register_tile.cuh>
#include <backward/parts/transposed_softmax.cuh>
#include <ptx/bulk_store.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/stmatrix.cuh>
#include <ptx/wgmma_columns.cuh>
#include <tile/tma_tile.cuh>

// Named barriers: a warpgroup's buffer is full, its buffer is empty, all additions have completed.
__device__ __forceinline__ int dQ_full(int warpgroup) {
  return 3 + warpgroup;
}
__device__ __forceinline__ int dQ_empty(int warpgroup) {
  return 3 + consumers + warpgroup;
}
constexpr int sums_left = 3 + 2 * consumers;
constexpr int adding_threads = warpgroup_size + warp_size;
constexpr int leaving_threads = consumers * adding_threads;

// The largest grid for which finish_dQ is launched early; larger grids leave too few SMs free.
constexpr int few_blocks = 32;

// Stores the warp's columns of dS, from `row` on. `operands` hold its transpose, dS^T.
template <int steps, int Br, int Bc>
__device__ __forceinline__ void store_dS(const unsigned (&operands)[steps][4],
                                         TmaTile<scalar, Br, Bc>& dS, const KeyRows& own,
                                         int row = 0) {
  const unsigned lane = opaque(own.lane), chunk = unsigned(own.first_key()) / 8 + lane / 8 % 2;
  scalar* const first = dS.at(row + lane % 8 + lane / 16 * 8, chunk);
#pragma unroll
  for (int i = 0; i < steps; ++i)  // chunks 16 rows apart have the same swizzle
    store_matrices_transposed(first + i * step * dS.in_row, operands[i]);
}

// Starts dQ = dS K for 64 rows from first_row, summed over `keys` keys from first_key, for the
// columns of K from first_box on.
template <int keys, int Br, int Bc, int d, int count>
__device__ __forceinline__ void begin_dQ(const TmaTile<scalar, Br, Bc>& dS,
                                         const TmaTile<scalar, Bc, d>& K, float (&dQ)[count],
                                         int first_row, int first_key, int first_box) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < keys / step; ++k)
    multiply_columns<scalar>(
        dQ, by_rows(dS.box[k / 4 + first_key / 64][first_row]) + k % 4 * wgmma_bytes,
        by_columns(K.box[first_box][first_key], Bc) + k * step * box_row_bytes, k > 0);
  wgmma_commit_group();
}

// Hands sums, from register `first` on, to the warp that adds them to global memory.
template <int columns, int count>
__device__ __forceinline__ void pass_part(const float (&sums)[count], RegisterTile<columns>& part,
                                          int warpgroup, int first = 0) {
  barrier_sync(dQ_empty(warpgroup), adding_threads);
  part.write(sums, first);
  fence_proxy_async();
  barrier_arrive(dQ_full(warpgroup), adding_threads);
}

// Adds the part that a warpgroup hands over next to `sum`, by TMA reduce-add.
template <int columns>
__device__ __forceinline__ void add_part(const RegisterTile<columns>& part,
                                         RegisterTile<columns>& sum, int warpgroup, bool elected) {
  barrier_arrive(dQ_empty(warpgroup), adding_threads);
  barrier_sync(dQ_full(warpgroup), adding_threads);
  wait_for_launch_before();  // the previous launch clears the sums; wait as late as possible
  if (elected) {
    bulk_add(&sum.fours[0][0].x, &part.fours[0][0].x, sizeof part / sizeof(float));
    bulk_commit_group();
    bulk_wait_group_read();
  }
  __syncwarp();  // before another thread signals that the buffer is free
}

// Adds a warpgroup's parts `first` … `end` - 1 of dQ to dQ_sum, tile by tile.
template <class Layout, class Task>
__device__ __forceinline__ void add_dQ(const RegisterTile<Layout::width>& part,
                                       RegisterTile<Layout::width>* dQ_sum, const Task& task,
                                       int warpgroup, int first, int end) {
  const bool elected = elect_one();
  task.for_tiles([&](int, int, long long tile) {
#pragma unroll 1
    for (int i = first; i < end; ++i)
      add_part(part, dQ_sum[tile * Layout::count + i], warpgroup, elected);
  });
}
