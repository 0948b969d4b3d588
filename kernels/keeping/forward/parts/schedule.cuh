#pragma once
// A static tile scheduler for a bias that batch elements share (attention/warp_bias.cuh).

#include <attention/extent.cuh>
#include <attention/row_tile.cuh>
#include <ptx/opaque.cuh>

// Gives each block a share of consecutive tiles of Q, in which the batch element varies first, then
// the tile of rows, then the head: most tiles of a share read the same rows of the bias. If the
// number of blocks is a multiple of the tiles of a head, as many neighbouring blocks have the same
// share of batch elements and heads, each for one tile of rows, and read K and V at the same time.
template <int Br, int Bc, bool by_length, bool batch_first, bool may_skip>
struct Schedule {
  static_assert(batch_first && !(causal || windowed || ragged || has_key_tiles),
                "all batch elements read the same tiles of the bias");
  struct Queue {};
  Sizes sizes;
  int batch, tiles, together, index, end;

  __device__ __forceinline__ Schedule(const Sizes& sizes, const Mods&, int heads, int batch,
                                      const Queue&)
      : sizes(sizes),
        batch(batch),
        tiles(cdiv(sizes.M, Br)),
        together(gridDim.x % tiles == 0 ? tiles : 1) {
    const int shares = gridDim.x / together, own = blockIdx.x / together;
    const int all = tiles / together * heads * batch, least = all / shares, more = all % shares;
    index = own * least + min(own, more) - 1;
    end = index + 1 + least + (own < more);
  }

  __device__ __forceinline__ void take_tiles(int*) const {}

  // Advances to the block's next tile of Q; returns false if there is none.
  __device__ __forceinline__ bool advance() { return ++index < end; }

  // Returns the current tile of Q. Opaque divisors keep divisions out of registers, as in
  // StaticSchedule.
  __device__ __forceinline__ RowTile task() const {
    const int elements = opaque(batch), columns = opaque(tiles / together);
    const int line = index / elements, tile = line % columns + blockIdx.x % together;
    return row_tile<Br, Bc>(extent_of(sizes, index % elements), tile * Br, line / columns,
                            index % elements);
  }

  template <int rows>
  __device__ __forceinline__ int own_end(const RowTile& task, int, int) const {
    return task.kv_end;
  }
};
