#pragma once
// The end of a block of wgmma_columns where `splits` blocks share the query heads of a group. Each
// adds its dK and dV to the sums of the key tile by TMA reduce-add. The last block of a key tile
// reads the sums back and stores the gradients.

#include <backward/parts/group_shares.cuh>
#include <backward/parts/key_sums.cuh>
#include <backward/parts/last_block.cuh>

template <class Part, int d, int dv>
struct BlockEnd {
  using Sums = KeySums<Part::width, d, dv>;
  const Sizes& sizes;
  int kv_heads;
  const Part* dQ_sum;
  Part* key_sums;
  int* counts;

  // Adds the parts of dK and dV that a warpgroup hands over, and counts the block.
  template <class Task>
  __device__ __forceinline__ void leave(const Part& part, int& was_last, const Task& task,
                                        int number, int all, int warpgroup) const {
    const bool elected = elect_one();
    const int index = index_of(task, number, all, warpgroup);
#pragma unroll 1
    for (int i = 0; i < Sums::count; ++i) add_part(part, sums(index).parts[i], warpgroup, elected);
    leave_sums(was_last, counts[index + 1], task.group / task.heads);  // counts[0]: tiles taken
  }
  // Hands over dK and dV, and reads the sums back if all blocks of the key tile have added theirs.
  template <class Consumer, class Task>
  __device__ __forceinline__ bool completes(Consumer& consumer, const Task& task, int number,
                                            int all) const {
    const int warpgroup = consumer.own.warpgroup;
    pass_parts(consumer.dK, consumer.shared.dQ[warpgroup], warpgroup);
    pass_parts(consumer.dV, consumer.shared.dQ[warpgroup], warpgroup);
    barrier_sync(sums_left, leaving_threads);
    if (!consumer.shared.is_last[warpgroup]) return false;
    const Sums& complete = sums(index_of(task, number, all, warpgroup));
    complete.template read<false>(consumer.dK);
    complete.template read<true>(consumer.dV);
    return true;
  }
  template <class Repair, int count>
  __device__ __forceinline__ void finish(const Repair&, Tensor<result>, const int (&)[count],
                                         int) const {}

 private:
  template <int registers>
  __device__ __forceinline__ static void pass_parts(const float (&from)[registers], Part& buffer,
                                                    int warpgroup) {
#pragma unroll
    for (int first = 0; first < registers; first += Part::width / 2)
      pass_part(from, buffer, warpgroup, first);
  }
  __device__ __forceinline__ Sums& sums(int index) const {
    return reinterpret_cast<Sums*>(key_sums)[index];
  }
  // Returns the index of a warpgroup's keys over all key heads. `all` is the number of tasks, key
  // tiles times splits. In packed batches some tile indices are unused; they count, too.
  template <int Br, int Bc>
  __device__ __forceinline__ int index_of(const KeyTile<Br, Bc>& task, int number, int all,
                                          int warpgroup) const {
    const int of_head = all / (kv_heads * (task.group / task.heads));
    const int tile = packed ? task.index % of_head
                            : task.batch * max(cdiv(sizes.N, Bc), 1) + task.first_key / Bc;
    return (task.kv_head * of_head + tile) * consumers + warpgroup;
  }
};
