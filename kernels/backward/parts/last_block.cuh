#pragma once
// The last block of a key head finishes dQ of the heads that share it, from the sums that all its
// blocks have added to. They are still in L2 then, and the products of other heads go on meanwhile.
// For long sequences a launch of its own does it: many multiprocessors would wait for this block.

#include <backward/parts/finish_dQ.cuh>
#include <ptx/named_barrier.cuh>

// A named barrier of the consumers and of the warp that adds for each warpgroup of them: all that
// the block adds to dQ has arrived in memory.
constexpr int sums_left = 7;
constexpr int leaving_threads = consumers * (warpgroup_size + warp_size);

// Whether a thread is the last of `all` that come here. It then sees what the others wrote before.
__device__ __forceinline__ bool is_last(int& count, int all) {
  __threadfence();
  const bool last = atomicAdd(&count, 1) == all - 1;
  __threadfence();
  return last;
}

// The end of a warp that adds; its elected lane has begun the additions.
__device__ __forceinline__ void leave_sums(int& was_last, int& count, int all, bool elected) {
  if (elected) {
    bulk_wait_group();
    was_last = is_last(count, all);
  }
  __syncwarp();
  barrier_arrive(sums_left, leaving_threads);
}

// The block's consumers finish dQ warp by warp, the loads of two pieces under way together.
__device__ __forceinline__ void finish_heads(const Work& work, const Queries& in) {
  constexpr int warps = consuming_threads / warp_size;
  const int tiles = cdiv(in.extent.M, Br), pieces = in.group * tiles * parts * Piece::in_part;
  const auto piece = [&](int number) {
    const int rest = number / Piece::in_part, head = rest / parts / tiles;
    return Piece(in, work.batch, head < in.group ? work.kv_head * in.group + head : in.heads,
                 rest / parts % tiles, rest % parts, number % Piece::in_part);
  };
#pragma unroll 1
  for (int i = threadIdx.x / warp_size % warps; i < pieces; i += 2 * warps) {
    const Piece one = piece(i), other = piece(i + warps);
    one.finish(in);
    other.finish(in);
  }
}
