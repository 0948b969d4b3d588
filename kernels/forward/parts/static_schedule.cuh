#pragma once
// The static tile scheduler, which assigns tiles of Q to persistent blocks.

#include <attention/extent.cuh>
#include <attention/row_tile.cuh>
#include <ptx/opaque.cuh>

// Tiles of Q are assigned in rounds. Under a causal mask tiles differ in length. The tiles of a few
// heads are therefore sorted together: the longest come first, and every second round runs from the
// last block to the first (snake order). All blocks then have about the same work, and K and V of
// these heads stay in the cache. With a block mask, its map sorts the tiles. With `batch_first`,
// for arrays shared by all batch elements, the batch elements of a head come one after another.
//
// Heads of few tiles are assigned one by one, and each block moves on by a tile in every round, so
// that all have done the same work after as many rounds as a head has tiles. Long and short tiles
// share the memory bandwidth. With `may_skip` a few blocks may be idle (slower up to d = 64).
template <int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
struct StaticSchedule {
  struct Queue {};  // a dynamic scheduler has one (kernels/with/forward/parts/ragged_schedule.cuh)
  Sizes sizes;
  const Mods* mods;
  int heads, all_heads, tiles = cdiv(sizes.M, Br);
  int slots = may_skip ? gridDim.x / tiles * tiles : gridDim.x, turned = heads_in_turn();
  int together = by_length ? heads_together() : all_heads;
  int first = may_skip && blockIdx.x >= slots ? turned : 0;
  int round = 0, slot = blockIdx.x, index = 0;

  __device__ __forceinline__ StaticSchedule(const Sizes& sizes, const Mods& mods, int heads,
                                            int batch, const Queue&)
      : sizes(sizes), mods(&mods), heads(heads), all_heads(heads * batch) {}

  // Returns the number of heads to sort: whole pairs of rounds, or about four rounds in equal sets,
  // as a small last set keeps few blocks busy (two for dv > 128, where K and V fill the cache).
  __device__ __forceinline__ int heads_together() const {
    const int pair = 2 * gridDim.x / tiles, most = max(1, dv > 128 || turned ? pair : 2 * pair);
    if (pair > 0 && (turned || all_heads % pair == 0)) return most;
    return cdiv(all_heads, max(1, (all_heads + most / 2) / most));
  }

  // Returns the number of heads that are assigned one by one, in groups of an even number of rounds
  // (then each block is back in its first slot); the last may be short by 1/32 of all heads.
  __device__ __forceinline__ int heads_in_turn() const {
    const int blocks = gridDim.x, group = tiles % 2 ? 2 * slots : slots;
    if (!by_length || has_key_tiles || tiles < 2 || tiles > (may_skip ? 8 : 4)) return 0;
    if (blocks % tiles > (may_skip ? blocks / 32 : 0)) return 0;
    return (all_heads + all_heads / 32) / group * group;
  }

  __device__ __forceinline__ void take_tiles(int*) const {}

  __device__ __forceinline__ bool in_turn() const {
    return by_length && !has_key_tiles && first < turned;
  }

  __device__ __forceinline__ int count() const {  // of heads that are assigned together
    return min(in_turn() ? turned : together, all_heads - first);
  }

  // Advances to the block's next tile of Q; returns false if there is none.
  __device__ __forceinline__ bool advance() {
    if constexpr (!by_length) {
      index = round++ * gridDim.x + blockIdx.x;
      return index < all_heads * tiles;
    } else {
      for (; first < all_heads; first += count(), round = 0) {
        const int blocks = in_turn() ? slots : gridDim.x;
        index = round * blocks + (round % 2 && !in_turn() ? blocks - 1 - slot : slot);
        round += 1;
        if (index < count() * tiles) return true;
        // Blocks that received one tile fewer come first in the order for the next heads.
        const int left = count() * tiles % blocks;
        slot = (slot + (cdiv(count() * tiles, blocks) % 2 ? blocks - left : left)) % blocks;
      }
      return false;
    }
  }

  // Returns the current tile of Q. Its range of keys is never empty: without keys, the tile reads
  // zeros. Opaque divisors keep the slow divisions here, where products in flight hide them.
  __device__ __forceinline__ RowTile task() const {
    const bool sorted = by_length && !in_turn();
    const int size = opaque(sorted ? count() : tiles), line = index / size;
    const int all = opaque(batch_first ? all_heads / heads : heads);
    int tile = sorted ? tiles - 1 - line : (index + (in_turn() ? round : 0)) % size;
    const int of_all = first + (sorted ? index % size : line);
    const int batch = batch_first ? of_all % all : of_all / all;
    const int head = batch_first ? of_all / all : of_all % all;
    Extent extent = extent_of(sizes, batch);
    if constexpr (has_key_tiles) {
      extent.take(batch, head, sizes.M, sizes.N, *mods);
      tile = extent.longest(cdiv(sizes.N, Bc), line);
    }
    RowTile task = row_tile<Br, Bc>(extent, tile * Br, head, batch);
    if (extent.N == 0) task.kv_begin = 1;
    if constexpr (has_key_tiles) task.kv_begin = min(task.kv_begin, (cdiv(sizes.N, Bc) - 1) * Bc);
    task.kv_end = max(task.kv_end, task.kv_begin + 1);
    return task;
  }

  // Returns the end of the keys that a warpgroup sees. It skips at most `most` key tiles after it.
  template <int rows>
  __device__ __forceinline__ int own_end(const RowTile& task, int warpgroup, int most) const {
    if constexpr (!causal) return task.kv_end;
    const Extent extent = extent_of(sizes, task.batch);
    const int own = extent.kv_end(min(task.row + (warpgroup + 1) * rows, extent.M) - 1);
    return max(max(own, task.kv_end - most * Bc), task.kv_begin + 1);
  }
};
