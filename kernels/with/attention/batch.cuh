#pragma once
// Batch elements of different lengths, and their tiles. Either the first rows of each one's place
// in arrays [batch, heads, rows, columns] count, or sequences lie packed, one after the other in
// the rows of arrays [heads, rows, columns]; these are then the problem's batch elements.
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

#include <attention/pages.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

// What the host passes, the argument `sizes` of a record.
struct Sizes {
  int M, N;           // queries and keys of a head
  int causal_offset;  // key j is seen if j <= i + causal_offset: N - M (bottom-right) or 0
                      // (top-left), plus what a window shows on the right
  int window_offset;  // key j is seen if j >= i + window_offset: the same, minus what it shows on
                      // the left
};  // In a ragged launch M and N count all rows, and the offsets are those from a query's position.

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

// A batch element: its queries, keys and offsets, and where its rows begin.
using Origin = PackedOrigin<packed>;
struct BatchElement : Origin, Sizes {
  // Whether a tile that begins with this row is one. All are, but for numbers in ragged launches.
  __device__ __forceinline__ bool has_tile_of_rows(int first_row) const {
    return !ragged || (first_row >= 0 && first_row < M);
  }
  __device__ __forceinline__ bool has_tile_of_keys(int first_key) const {
    return !ragged || (first_key >= 0 && first_key < N);
  }
};

// Masks of a ragged batch are aligned for each element.
template <class Arrays>
__device__ __forceinline__ BatchElement batch_element(const Sizes& sizes,
                                                      [[maybe_unused]] const Arrays& mods,
                                                      [[maybe_unused]] int batch) {
  if constexpr (ragged) {
    const PackedRows rows = used_queries(mods, batch, sizes.M),
                     keys = used_keys(mods, batch, sizes.N);
    const int M = rows.count, N = keys.count;
    const long long position = Arrays::bottom_right ? N - M : 0;
    const int left = int(max((long long)-M, min((long long)N, position + sizes.window_offset)));
    int right = int(max(-1LL - M, min(position + sizes.causal_offset, max(N, 1) - 1LL)));
    if constexpr (windowed) right = max(right, left);
    BatchElement element = {{}, {M, N, right, left}};
    element.begin_at(rows.first, keys.first);
    return element;
  } else {
    return {{}, sizes};
  }
}

// Converts between a tile index over all heads and the tile, head and batch element; counts the
// tiles of a head. A tile has `size` rows; `together` heads share it.
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
// Converts an index of a tile of keys.
template <int size, class Arrays>
__device__ __forceinline__ Place place_of_keys(int index, const Sizes& sizes,
                                               [[maybe_unused]] const Arrays& mods, int heads) {
  if constexpr (packed)
    return ragged_place<size, 1>(index, mods.cu_seqlens_k_, sizes.N, heads);
  else
    return place(index, max(cdiv(sizes.N, size), 1), heads);
}

// Keys or values that lie in pages.
template <class Table>
__device__ __forceinline__ Pages pages_of(const Table& table, int count, int batch) {
  return {table.data + batch * table.stride[0], table.size[1], count};
}

// Keys or values of all batch elements, with the interface of a Tensor.
template <class T, class Table>
struct PagedTensor {
  Tensor<T> tensor;  // its batch stride is that of pages
  Table table;
  int count;

  __device__ __forceinline__ Pages pages(int batch) const { return pages_of(table, count, batch); }
  __device__ __forceinline__ T* row(int batch, int head, int row) const {
    return tensor.row(pages(batch).page_of(row), head, row % page_rows);
  }
};

// Keys or values as rows of batch elements, in pages or not.
template <bool in_pages = (page_size > 0), class T, class Arrays>
__device__ __forceinline__ auto rows_of(Tensor<T> tensor, [[maybe_unused]] const Arrays& mods) {
  if constexpr (in_pages)
    return PagedTensor<T, decltype(mods.page_table_)>{tensor, mods.page_table_, mods.page_count};
  else
    return tensor;
}
