#pragma once
// Maps row tiles, as (head, row) of one batch element, to indices over all of them.

#include <attention/tile_index.cuh>

template <int Br>
struct TilesOfRows {
  int batch, heads, M;  // if packed, batch is the sequence's first tile and M the tiles per head

  __device__ __forceinline__ long long operator()(int head, int row) const {
    if constexpr (packed) return (long long)head * M + batch + row / Br;
    return ((long long)batch * heads + head) * cdiv(M, Br) + row / Br;
  }
};
template <int Br, class Arrays>
__device__ __forceinline__ TilesOfRows<Br> tiles_of([[maybe_unused]] const Arrays& mods, int batch,
                                                    int heads, int M) {
  if constexpr (packed)
    return {int(tile_of_rows<Br>(Sizes{M}, mods, batch, 0, heads, 0)), heads,
            tiles_of_rows<Br>(Sizes{M}, mods)};
  else
    return {batch, heads, M};
}
