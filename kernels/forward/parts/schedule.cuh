#pragma once
// Which row tiles a block computes that stays on its multiprocessor.

#include <attention/extent.cuh>
#include <ptx/opaque.cuh>

// Row tiles are dealt out in rounds. With a causal mask, where tiles differ in length, the tiles of
// as many heads as make two rounds are dealt out together, the longest first; the second round goes
// from the last block to the first, which evens out the first round. So all blocks have about the
// same to do, and heads whose K and V are in the cache are finished before others. By the map of a
// block mask it is the same, and the map has the order of the tiles. Where the batch elements share
// what a text reads, those of a head follow each other.
//
// Heads of few tiles are dealt out in two halves, a round each: first all tiles of one half, then
// those of the other. A short tile needs Q and O for few products. In each round blocks with long
// tiles and blocks with short ones share the memory, and all blocks that read K and V of a head do
// so together.
template <int Br, int Bc, bool by_length, bool batch_first, bool by_lengths = ragged>
struct Schedule {
  Sizes sizes;
  const Mods* mods;
  int heads, all_heads, tiles, together;
  int first = 0, round = 0, seat = blockIdx.x, index = 0;

  __device__ __forceinline__ Schedule(const Sizes& sizes, const Mods& mods, int heads, int batch)
      : sizes(sizes),
        mods(&mods),
        heads(heads),
        all_heads(heads * batch),
        tiles(cdiv(sizes.M, Br)),
        together(by_length ? max(1, 2 * int(gridDim.x) / tiles & (few_tiles() ? ~1 : ~0))
                           : all_heads) {}

  __device__ __forceinline__ bool few_tiles() const {
    return by_length && !has_key_tiles && tiles <= 8;
  }

  // How many heads are dealt out together, from `first` on.
  __device__ __forceinline__ int count() const { return min(together, all_heads - first); }

  // Whether these are dealt out in two halves.
  __device__ __forceinline__ bool in_halves() const {
    return few_tiles() && together > 1 && all_heads - first >= together;
  }

  // Goes to the block's next row tile, if there is one.
  __device__ __forceinline__ bool advance() {
    const int blocks = gridDim.x;
    if constexpr (!by_length) {
      index = round++ * blocks + blockIdx.x;
      return index < all_heads * tiles;
    } else {
      for (; first < all_heads; first += together, round = 0) {
        const int width = in_halves() ? together / 2 * tiles : blocks;
        index = round * width + (round % 2 ? width - 1 - seat : seat);
        round += 1;
        if (seat < width && index < count() * tiles) return true;
        // The blocks that had fewer tiles begin with the next heads.
        const int dealt = count() * tiles, left = in_halves() ? width : dealt % blocks;
        seat = (seat + (in_halves() || dealt / blocks % 2 == 0 ? blocks - left : left)) % blocks;
      }
      return false;
    }
  }

  // The row tile, with at least one tile of keys: without keys it is one of zeros. Its divisions
  // take a while, and an opaque divisor keeps them where they are called: between products.
  __device__ __forceinline__ RowTile task() const {
    const int size = opaque(!by_length ? tiles : in_halves() ? together / 2 : count());
    const int all = opaque(batch_first ? all_heads / heads : heads);
    const bool second = by_length && in_halves() && index >= together / 2 * tiles;
    int tile = by_length ? tiles - 1 - index / size + (second ? tiles : 0) : index % size;
    const int of_all =
        first + (second ? together / 2 : 0) + (by_length ? index % size : index / size);
    const int batch = batch_first ? of_all % all : of_all / all;
    const int head = batch_first ? of_all / all : of_all % all;
    Extent extent = extent_of(sizes, batch);
    if constexpr (has_key_tiles) {
      extent.take(batch, head, sizes.M, sizes.N, *mods);
      tile = extent.longest(cdiv(sizes.N, Bc), index / size);
    }
    RowTile task = row_tile<Br, Bc>(extent, tile * Br, head, batch);
    if (extent.N == 0) task.kv_begin = 1;
    if constexpr (has_key_tiles) task.kv_begin = min(task.kv_begin, (cdiv(sizes.N, Bc) - 1) * Bc);
    task.kv_end = max(task.kv_end, task.kv_begin + 1);
    return task;
  }

  // Where the keys end that a warpgroup sees which has `rows` of the tile's rows. It may skip the
  // tiles after that, but at most `most` of them.
  template <int rows>
  __device__ __forceinline__ int own_end(const RowTile& task, int warpgroup, int most) const {
    if constexpr (!causal) return task.kv_end;
    const Extent extent = extent_of(sizes, task.batch);
    const int own = extent.kv_end(min(task.row + (warpgroup + 1) * rows, extent.M) - 1);
    return max(max(own, task.kv_end - most * Bc), task.kv_begin + 1);
  }
};

// The same of elements of different lengths, in their order. A number of a tile may stand for none.
template <int Br, int Bc, bool by_length, bool batch_first>
struct Schedule<Br, Bc, by_length, batch_first, true> {
  Sizes sizes;
  const Mods* mods;
  int heads, all, index;
  Place found;

  __device__ __forceinline__ Schedule(const Sizes& sizes, const Mods& mods, int heads, int batch)
      : sizes(sizes),
        mods(&mods),
        heads(heads),
        all(tiles_of_rows<Br>(sizes, mods) * heads * (packed ? 1 : batch)),
        index(int(blockIdx.x) - int(gridDim.x)) {}

  __device__ __forceinline__ bool advance() {
    while ((index += gridDim.x) < all) {
      found = place_of_rows<Br>(index, sizes, *mods, heads);
      const Extent extent = extent_of(sizes, *mods, found.batch);
      if (extent.has_tile_of_rows(found.tile * Br)) return true;
    }
    return false;
  }
  __device__ __forceinline__ RowTile task() const {
    const Extent extent = extent_of(sizes, *mods, found.batch);
    RowTile task = row_tile<Br, Bc>(extent, found.tile * Br, found.head, found.batch);
    if (extent.N == 0) task.kv_begin = Bc;  // copies of pairs begin at whole chunks
    task.kv_end = max(task.kv_end, task.kv_begin + 1);
    return task;
  }
  template <int rows>
  __device__ __forceinline__ int own_end(const RowTile& task, int warpgroup, int most) const {
    if constexpr (!causal) return task.kv_end;
    const Extent extent = extent_of(sizes, *mods, task.batch);
    const int own = extent.kv_end(min(task.row + (warpgroup + 1) * rows, extent.M) - 1);
    return max(max(own, task.kv_end - most * Bc), task.kv_begin + 1);
  }
};
