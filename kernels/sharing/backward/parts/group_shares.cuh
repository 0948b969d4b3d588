#pragma once
// Blocks that share the query heads of a group: each stores its dK and dV of a key tile in global
// memory. The last block of the tile sums them in the order of shares, so that every run returns
// the same bits.

#include <tile/math.cuh>
#include <tile/warp.cuh>

__device__ __forceinline__ int blocks_of_group(int splits) {
  return splits;
}

// KeySums, ValueSums: a thread's accumulators of dK and dV, in the last `summing_threads` threads.
template <class KeySums, class ValueSums, int summing_threads>
struct GroupShares {
  static constexpr int keys = sizeof(KeySums) / 16, values = sizeof(ValueSums) / 16;
  static constexpr int warps = summing_threads / warp_size;
  struct Chunk {
    real numbers[16 / sizeof(real)];
  };

  real* sums;          // [grid, keys + values, summing_threads] chunks of 16 bytes
  int* counts;         // [grid, warps]: blocks of a key tile whose warp has stored its accumulators
  int splits, stride;  // shares of a group; the distance from a tile's index to its next share's

  // Stores a warp's dK and dV. In the last block of a key tile, replaces them with the sums over
  // all shares and returns true. Warps hold different elements, hence each has its own count.
  // index: the block's key tile, counted over all shares of all key heads.
  __device__ __forceinline__ bool complete(KeySums& dK, ValueSums& dV, int index) const {
    store(dK, index, 0);
    store(dV, index, keys);
    const int first = index - index / stride % splits * stride;
    if (!is_last(counts[first * warps + thread() / warp_size])) return false;
    sum(dK, first, 0);
    sum(dV, first, keys);
    return true;
  }

 private:
  __device__ __forceinline__ static int thread() {
    return threadIdx.x - (threads - summing_threads);
  }
  __device__ __forceinline__ float4* at(int index, int chunk) const {
    const long long row = (long long)index * (keys + values) + chunk;
    return reinterpret_cast<float4*>(sums) + row * summing_threads + thread();
  }
  template <class Sums>
  __device__ __forceinline__ static auto& numbers(Sums& sums) {
    return reinterpret_cast<real(&)[sizeof(Sums) / sizeof(real)]>(sums);
  }
  template <class Sums>
  __device__ __forceinline__ void store(Sums& from, int index, int first_chunk) const {
    constexpr int per_chunk = 16 / sizeof(real);
#pragma unroll
    for (int i = 0; i < int(sizeof(Sums)) / 16; ++i) {
      Chunk chunk;
#pragma unroll
      for (int j = 0; j < per_chunk; ++j) chunk.numbers[j] = numbers(from)[i * per_chunk + j];
      *at(index, first_chunk + i) = __builtin_bit_cast(float4, chunk);
    }
  }
  // Counts the warp's block, and returns whether it is the last one of its key tile. Then the warp
  // sees what the other blocks have stored.
  __device__ __forceinline__ bool is_last(int& stored) const {
    __threadfence();
    __syncwarp();
    const int earlier = threadIdx.x % warp_size == 0 ? atomicAdd(&stored, 1) : 0;
    const bool last = __shfl_sync(full_warp, earlier, 0) == splits - 1;
    __threadfence();
    return last;
  }
  // Sums accumulators over the shares. Other blocks wrote them, so the reads bypass L1.
  template <class Sums>
  __device__ __forceinline__ void sum(Sums& to, int first, int first_chunk) const {
    constexpr int per_chunk = 16 / sizeof(real);
    for (real& x : numbers(to)) x = 0;
#pragma unroll 1
    for (int share = 0; share < splits; ++share)
#pragma unroll
      for (int i = 0; i < int(sizeof(Sums)) / 16; ++i) {
        const float4 four = __ldcg(at(first + share * stride, first_chunk + i));
        const Chunk chunk = __builtin_bit_cast(Chunk, four);
#pragma unroll
        for (int j = 0; j < per_chunk; ++j) numbers(to)[i * per_chunk + j] += chunk.numbers[j];
      }
  }
};
