#pragma once
// Batch elements of different lengths, and their tiles. Either arrays [batch, heads, rows, columns]
// are padded, and only the first rows of each element are used; or sequences are packed one after
// the other along the rows of arrays [heads, rows, columns], and each sequence is a batch element.
//
// The host defines above every kernel `ragged`, true if lengths differ, and `packed`, true if
// sequences are packed. If ragged, sizes.M and sizes.N are the rows of the arrays, and Mods has
//   is_packed                      true if sequences are packed; then it has
//   cu_seqlens_q_, cu_seqlens_k_   the first row of each sequence, and the end of the last one
//   seqused_q_, seqused_k_         used rows per sequence, if has_seqused_q, has_seqused_k
//   bottom_right                   true if the last query is at the position of the last key
// Lengths may be unchecked. A sequence that is not inside the arrays has no rows, and no element
// has more rows than its array, so that accesses stay inside the arrays.

#include <attention/pages.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

// The sizes of a problem, which the host passes to every launch.
struct Sizes {
  int M, N;  // queries and keys of a head
  // Query i sees key j if i + window_offset <= j <= i + causal_offset. Both are N - M
  // (bottom-right) or 0 (top-left), with a window minus left and plus right keys, respectively.
  int causal_offset;
  int window_offset;
};  // In a ragged launch M and N count all rows; offsets start from a query's position.

// Maps rows of a sequence to rows of packed arrays. Other arrays need no mapping.
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

// Returns the rows of a sequence, clipped to the `total` rows of the array.
template <class Offsets>
__device__ __forceinline__ PackedRows packed_rows_of(const Offsets& offsets, int sequence,
                                                     int total) {
  const int first = offsets.data[sequence], end = min(offsets.data[sequence + 1], total);
  if (first < 0 || end <= first) return {0, 0};
  return {first, end - first};
}

// Returns the used rows of a batch element. In padded arrays the first row is 0.
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

// A batch element: its numbers of queries and keys, its mask offsets and its first rows.
using Origin = PackedOrigin<packed>;
struct BatchElement : Origin, Sizes {
  // Returns whether a tile starts at this row. In ragged launches some tile indices are unused.
  __device__ __forceinline__ bool has_tile_of_rows(int first_row) const {
    return !ragged || (first_row >= 0 && first_row < M);
  }
  __device__ __forceinline__ bool has_tile_of_keys(int first_key) const {
    return !ragged || (first_key >= 0 && first_key < N);
  }
};

// Returns a batch element. In a ragged batch, masks are aligned separately for each element.
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

template <class Table>
__device__ __forceinline__ Pages pages_of(const Table& table, int count, int batch) {
  return {table.data + batch * table.stride[0], table.size[1], count};
}

// Paged keys or values of all batch elements, with the interface of a Tensor.
template <class T, class Table>
struct PagedTensor {
  Tensor<T> tensor;  // its batch stride is the page stride
  Table table;
  int count;

  __device__ __forceinline__ Pages pages(int batch) const { return pages_of(table, count, batch); }
  __device__ __forceinline__ T* row(int batch, int head, int row) const {
    return tensor.row(pages(batch).page_of(row), head, row % page_rows);
  }
};

// Returns keys or values, paged or not, which are then addressed by row of a batch element.
template <bool in_pages = (page_size > 0), class T, class Arrays>
__device__ __forceinline__ auto rows_of(Tensor<T> tensor, [[maybe_unused]] const Arrays& mods) {
  if constexpr (in_pages)
    return PagedTensor<T, decltype(mods.page_table_)>{tensor, mods.page_table_, mods.page_count};
  else
    return tensor;
}
