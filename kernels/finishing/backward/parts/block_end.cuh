#pragma once
// The end of a block where the last block of each key head scales and stores dQ of its query heads,
// while the sums are in L2 and other blocks keep running.

#include <backward/parts/finish_dQ.cuh>
#include <backward/parts/group_shares.cuh>
#include <backward/parts/last_block.cuh>

// Finishes dQ with the block's consumer warps. Each warp keeps the loads of two pieces in flight.
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

template <class Part, int d, int dv>
struct BlockEnd {
  const Sizes& sizes;
  int kv_heads;
  const Part* dQ_sum;
  Part* key_sums;
  int* counts;

  // Counts a warp that has added dQ of a key tile.
  template <int Br, int Bc>
  __device__ __forceinline__ void leave(const Part&, int& was_last, const KeyTile<Br, Bc>& task,
                                        int, int, int) const {
    leave_sums(was_last, counts[task.batch * kv_heads + task.kv_head],
               consumers * max(cdiv(sizes.N, Bc), 1));
  }
  template <class Consumer, class Task>
  __device__ __forceinline__ bool completes(Consumer&, const Task&, int, int) const {
    return true;
  }
  template <int Br>
  __device__ __forceinline__ void finish(const Repair<d, dv, scalar, StatsOfTiles<Br>>& repair,
                                         Tensor<result> dQ, const int (&was_last)[consumers],
                                         int group) const {
    barrier_sync(sums_left, leaving_threads);
    if (was_last[0] || was_last[1]) finish_heads<Br, d, dv>({repair, dQ_sum, dQ}, group);
  }
};
