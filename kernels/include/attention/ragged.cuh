#pragma once
// Ragged batches: batch elements of different lengths. Either the first rows of each one's place in
// arrays [batch, heads, rows, columns] count, or sequences lie packed, one after the other in the
// rows of arrays [heads, rows, columns]; these are then the problem's batch elements.
//
// The host writes above every kernel `ragged`: whether the launch goes by lengths, and `packed`:
// whether it goes by sequences. If so, sizes.M and sizes.N are the rows of the arrays. Of a ragged
// batch struct Mods has, in every launch,
//   is_packed                      whether it is packed, and
//   cu_seqlens_q_, cu_seqlens_k_   then the first row of each sequence, and where the last one ends
//   seqused_q_, seqused_k_         how many of its rows count, if has_seqused_q, has_seqused_k
//   bottom_right                   whether the last query is at the position of the last key
// Nobody may have seen them before. A sequence that is not inside the arrays has no rows, and no
// element has more rows than its place, so that nothing outside is read or written.
//
// Tiles of rows are counted without a sum over lengths. An element's place has all its tiles; those
// of sequence b begin with number cu_seqlens[b] / size + b, which leaves room for its last tile.
// Some numbers have no tile.

#include <tile/math.cuh>
#include <tile/tensor.cuh>

// Where the rows of a sequence begin in packed arrays. Of other arrays nothing is kept.
template <bool used>
struct PackedOrigin {
  __device__ __forceinline__ void begin_at(int, int) {}
  __device__ __forceinline__ int packed_row(int row) const { return row; }
  __device__ __forceinline__ int packed_key(int key) const { return key; }
  __device__ __forceinline__ int packed_batch(int batch) const { return batch; }
};
template <>
struct PackedOrigin<true> {
  int first_row, first_key;

  __device__ __forceinline__ void begin_at(int row, int key) { *this = {row, key}; }
  __device__ __forceinline__ int packed_row(int row) const { return first_row + row; }
  __device__ __forceinline__ int packed_key(int key) const { return first_key + key; }
  __device__ __forceinline__ int packed_batch(int) const { return 0; }
};

struct PackedRows {
  int first, count;
};

// The rows of a sequence, of `total` in the array.
template <class Offsets>
__device__ __forceinline__ PackedRows packed_rows_of(const Offsets& offsets, int sequence,
                                                     int total) {
  const int first = offsets.data[sequence], end = min(offsets.data[sequence + 1], total);
  if (first < 0 || end <= first) return {0, 0};
  return {first, end - first};
}

// The rows of a batch element that count. Those of padded arrays begin at its own row 0.
template <class Arrays>
__device__ __forceinline__ PackedRows used_queries(const Arrays& mods, int sequence, int total) {
  PackedRows found = {0, total};
  if constexpr (Arrays::is_packed) found = packed_rows_of(mods.cu_seqlens_q_, sequence, total);
  if constexpr (Arrays::has_seqused_q)
    found.count = max(0, min(found.count, mods.seqused_q_.data[sequence]));
  return found;
}
template <class Arrays>
__device__ __forceinline__ PackedRows used_keys(const Arrays& mods, int sequence, int total) {
  PackedRows found = {0, total};
  if constexpr (Arrays::is_packed) found = packed_rows_of(mods.cu_seqlens_k_, sequence, total);
  if constexpr (Arrays::has_seqused_k)
    found.count = max(0, min(found.count, mods.seqused_k_.data[sequence]));
  return found;
}

// The number of a sequence's first tile of `size` rows, where `together` rows come of each.
template <int size, int together, class Offsets>
__device__ __forceinline__ int first_tile_number(const Offsets& offsets, int sequence, int total) {
  return max(0, min(offsets.data[sequence], total)) * together / size + sequence;
}

// The numbers of tiles of a head.
template <int size, int together, class Offsets>
__device__ __forceinline__ int tile_numbers(const Offsets& offsets, int total) {
  return total * together / size + offsets.size[0] - 1;
}

// The sequence and its tile that a number of a tile of all heads stands for.
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
