#pragma once
// Sums dQ = dS K of each tile in memory. A warpgroup writes its part to shared memory and goes on,
// while another warp has the copy engine add it. The last block of a key head finishes dQ of the
// heads that share it: the sums are still in L2 then, and other blocks go on. For long sequences or
// few heads a separate launch does it, because many multiprocessors would wait.

#include <backward/parts/finish_dQ.cuh>
#include <backward/parts/transposed_softmax.cuh>
#include <ptx/bulk_store.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/stmatrix.cuh>
#include <ptx/wgmma_columns.cuh>
#include <tile/tma_tile.cuh>

// Named barriers: a warpgroup's part is written; it has been read; all additions have ended.
__device__ __forceinline__ int dQ_full(int warpgroup) {
  return 3 + warpgroup;
}
__device__ __forceinline__ int dQ_empty(int warpgroup) {
  return 3 + consumers + warpgroup;
}
constexpr int sums_left = 3 + 2 * consumers;
constexpr int adding_threads = warpgroup_size + warp_size;
constexpr int leaving_threads = consumers * adding_threads;

// The most blocks of a grid that lets finish_dQ begin early; larger grids leave it too few SMs.
constexpr int few_blocks = 32;

// Writes the warp's columns of dS, whose transpose these operands are, from a row on.
template <int steps, int Br, int Bc>
__device__ __forceinline__ void store_dS(const unsigned (&operands)[steps][4],
                                         TmaTile<scalar, Br, Bc>& dS, const KeyRows& own,
                                         int row = 0) {
  const unsigned lane = opaque(own.lane), chunk = unsigned(own.first_key()) / 8 + lane / 8 % 2;
  scalar* const first = dS.at(row + lane % 8 + lane / 16 * 8, chunk);
#pragma unroll
  for (int i = 0; i < steps; ++i)  // chunks 16 rows apart are swizzled alike
    store_matrices_transposed(first + i * step * dS.in_row, operands[i]);
}

// Begins dQ = dS K for 64 rows from first_row on, `keys` keys from first_key on, and columns of K
// from a box on.
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

// Passes a part of dQ, which begins with register number `first`, to the warp that adds it.
template <int columns, int count>
__device__ __forceinline__ void pass_dQ(const float (&dQ)[count], RegisterTile<columns>& part,
                                        int warpgroup, int first = 0) {
  barrier_sync(dQ_empty(warpgroup), adding_threads);
  part.write(dQ, first);
  fence_proxy_async();
  barrier_arrive(dQ_full(warpgroup), adding_threads);
}

// Has the copy engine add a warpgroup's parts `first` … `end` - 1 of dQ of each tile to the sums in
// memory.
template <class Layout, class Task>
__device__ __forceinline__ void add_dQ(const RegisterTile<Layout::width>& part,
                                       RegisterTile<Layout::width>* dQ_sum, const Task& task,
                                       int warpgroup, int first, int end) {
  const bool elected = elect_one();
  task.for_tiles([&](int, int, long long tile) {
#pragma unroll 1
    for (int i = first; i < end; ++i) {
      barrier_arrive(dQ_empty(warpgroup), adding_threads);
      barrier_sync(dQ_full(warpgroup), adding_threads);
      wait_for_launch_before();  // which clears the sums; an earlier wait would hold up the block
      if (elected) {
        bulk_add(&dQ_sum[tile * Layout::count + i].fours[0][0].x, &part.fours[0][0].x,
                 sizeof part / sizeof(float));
        bulk_commit_group();
        bulk_wait_group_read();
      }
      __syncwarp();  // before another thread signals that the buffer is free
    }
  });
}

// Whether a thread is the last of `all` that call this. It then sees what the others wrote before.
__device__ __forceinline__ bool is_last(int& count, int all) {
  __threadfence();
  const bool last = atomicAdd(&count, 1) == all - 1;
  __threadfence();
  return last;
}

// Ends a warp that adds: waits for its additions, and notes whether it is the last one.
__device__ __forceinline__ void leave_sums(int& was_last, int& count, int all) {
  if (elect_one()) {
    bulk_wait_group();
    wait_for_launch_before();  // which clears the count
    was_last = is_last(count, all);
  }
  __syncwarp();
  barrier_arrive(sums_left, leaving_threads);
}

// Lets the block's consumers finish dQ warp by warp, with the loads of two pieces in flight.
template <int Br, int d, int dv>
__device__ __forceinline__ void finish_heads(const QuerySums<Br, d, dv>& in, int group) {
  using Rows = Piece<Br, d, dv>;
  constexpr int warps = consuming_threads / warp_size, parts = Rows::Layout::count;
  const int tiles = cdiv(in.repair.extent.M, Br), pieces = group * tiles * parts * Rows::in_part;
  const auto piece = [&](int number) {
    const int rest = number / Rows::in_part, head = rest / parts / tiles;
    return Rows(in, head < group ? in.repair.kv_head * group + head : in.repair.stats.number.heads,
                rest / parts % tiles, rest % parts, number % Rows::in_part);
  };
#pragma unroll 1
  for (int i = threadIdx.x / warp_size % warps; i < pieces; i += 2 * warps) {
    const Rows one = piece(i), other = piece(i + warps);
    one.finish(in);
    other.finish(in);
  }
}
