#pragma once
// Tile indices over all heads and batch elements, which may be packed sequences.
//
// Tile indices are computed without summing lengths. In padded arrays each element has as many
// indices as its array has tiles. In packed arrays the indices of sequence b start at cu_seqlens[b]
// / size + b, which leaves room for a partial last tile. Some indices are unused.

#include <attention/batch.cuh>

// Returns the index of a sequence's first tile of `size` rows; each row counts `together` times.
template <int size, int together, class Offsets>
__device__ __forceinline__ int first_tile_number(const Offsets& offsets, int sequence, int total) {
  return max(0, min(offsets.data[sequence], total)) * together / size + sequence;
}

// Returns the number of tile indices per head.
template <int size, int together, class Offsets>
__device__ __forceinline__ int tile_numbers(const Offsets& offsets, int total) {
  return total * together / size + offsets.size[0] - 1;
}

// Returns the sequence and its tile for a tile index over all heads.
template <int size, int together, class Offsets>
__device__ __forceinline__ Place ragged_place(int index, const Offsets& offsets, int total,
                                              int heads) {
  const Place all = place(index, tile_numbers<size, together>(offsets, total), heads);
  int sequence = 0, last = offsets.size[0] - 2;
  while (sequence < last) {
    const int middle = (sequence + last + 1) / 2;
    if (first_tile_number<size, together>(offsets, middle, total) <= all.tile)
      sequence = middle;
    else
      last = middle - 1;
  }
  return {all.tile - first_tile_number<size, together>(offsets, sequence, total), all.head,
          sequence};
}

// Converts an index over the tiles of all heads. A tile has `size` rows of `together` heads in all.
template <int size, int together = 1, class Arrays>
__device__ __forceinline__ Place place_of_rows(int index, const Sizes& sizes,
                                               [[maybe_unused]] const Arrays& mods, int heads) {
  if constexpr (packed)
    return ragged_place<size, together>(index, mods.cu_seqlens_q_, sizes.M, heads);
  else
    return place(index, cdiv(sizes.M * together, size), heads);
}
template <int size, class Arrays>
__device__ __forceinline__ long long tile_of_rows(const Sizes& sizes,
                                                  [[maybe_unused]] const Arrays& mods, int batch,
                                                  int head, int heads, int row) {
  if constexpr (packed)
    return tile_numbers<size, 1>(mods.cu_seqlens_q_, sizes.M) * (long long)head +
           first_tile_number<size, 1>(mods.cu_seqlens_q_, batch, sizes.M) + row / size;
  else
    return ((long long)batch * heads + head) * cdiv(sizes.M, size) + row / size;
}
template <int size, class Arrays>
__device__ __forceinline__ int tiles_of_rows(const Sizes& sizes,
                                             [[maybe_unused]] const Arrays& mods) {
  if constexpr (packed)
    return tile_numbers<size, 1>(mods.cu_seqlens_q_, sizes.M);
  else
    return cdiv(sizes.M, size);
}
// Converts the index of a key tile to a tile, head and batch element; without an index (-1), to a
// tile that no element has.
template <int size, class Arrays>
__device__ __forceinline__ Place place_of_keys(int index, const Sizes& sizes,
                                               [[maybe_unused]] const Arrays& mods, int heads) {
  if (packed && index < 0) return {-1, 0, 0};
  if constexpr (packed)
    return ragged_place<size, 1>(index, mods.cu_seqlens_k_, sizes.N, heads);
  else
    return place(index, max(cdiv(sizes.N, size), 1), heads);
}
