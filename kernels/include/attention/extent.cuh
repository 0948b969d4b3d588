#pragma once
// The geometry of one batch element: how many queries and keys it has, and which keys each query
// sees. Query i sees keys kv_begin(i) … kv_end(i) - 1: kv_end is what a causal mask and the ends of
// the keys leave, kv_begin is the left end of a window.
//
// What the host writes above every kernel:
//  - types: scalar, that of the tensors; result, of O, dQ, dK and dV; real, of sums and lse (float;
//    double for float64); operand, what tensor cores multiply, which may be narrower than scalar;
//  - constants of sizes and tiles, which the first comment of a .cu file names;
//  - options: causal and windowed here, positive_scale in score.cuh, those of score_context.cuh.

#include <attention/pages.cuh>
#include <attention/ragged.cuh>
#include <attention/score_context.cuh>
#include <tile/math.cuh>

// Whether a row may not see all keys of a tile that lie in the arrays.
constexpr bool has_mask = causal || windowed || has_mask_mod || ragged;

// What the host passes, the argument `sizes` of a record.
struct Sizes {
  int M, N;           // queries and keys of a head
  int causal_offset;  // key j is seen if j <= i + causal_offset: N - M (bottom-right) or 0
                      // (top-left), plus what a window shows on the right
  int window_offset;  // key j is seen if j >= i + window_offset: the same, minus what it shows on
                      // the left
};  // In a ragged launch M and N count all rows, and the offsets are those from a query's position.

struct Extent : HeadContext<has_context>, PackedOrigin<packed> {
  int M, N, causal_offset, window_offset;

  // The extent of another head. Without expressions, sinks and dropout no copy is made.
  template <bool used = has_context>
  __device__ __forceinline__ decltype(auto) of_head([[maybe_unused]] int head) const {
    if constexpr (used) {
      Extent extent = *this;
      extent.move_to(head);
      return extent;
    } else {
      return (*this);
    }
  }

  __device__ __forceinline__ int kv_end(int row) const {
    if constexpr (causal) return max(0, min(N, row + causal_offset + 1));
    return N;
  }

  __device__ __forceinline__ int kv_begin(int row) const {
    if constexpr (windowed) return max(0, min(N, row + window_offset));
    return 0;
  }

  // Whether a tile that begins with this row is one. All are, but for numbers in ragged launches.
  __device__ __forceinline__ bool has_tile_of_rows(int first_row) const {
    return !ragged || (first_row >= 0 && first_row < M);
  }
  __device__ __forceinline__ bool has_tile_of_keys(int first_key) const {
    return !ragged || (first_key >= 0 && first_key < N);
  }

  // The mask of one pair.
  __device__ __forceinline__ bool sees(int row, int key, int more = 0) const {
    return in_reach(row, key) && shown(row, key, more);
  }

  // Writes the largest score of a row, if the call asks for it; NaN where the row's sum of weights
  // is. In a tile of several heads `more` is the head's number from the first one.
  __device__ __forceinline__ void write_row_max(int row, real score, real sum, int more = 0) const {
    this->store_row_max(this->packed_row(row), more, sum == sum ? score : sum);
  }

  // What causal masks and windows say. A key left of the window makes `inside` negative: as
  // unsigned, it is larger than any distance in the window, so one comparison checks both ends.
  __device__ __forceinline__ bool in_reach(int row, int key) const {
    if constexpr (windowed) {
      const int inside = key - row - window_offset;
      return key < N &&
             (causal ? unsigned(inside) <= unsigned(causal_offset - window_offset) : inside >= 0);
    }
    return key < kv_end(row);
  }

  // Whether mask expressions show a pair, in reach or not.
  __device__ __forceinline__ bool shown(int row, int key, int more = 0) const {
    return !has_mask_mod || shows(index_of<true>(row, 0, M), index_of<true>(key, 0, N), more);
  }

  // Whether mask expressions hide a pair that exists.
  template <class Key>
  __device__ __forceinline__ bool hides(Index row, Key key, int more = 0) const {
    return has_mask_mod && !shows(row, key, more);
  }

  // in_reach() for a key that exists, by its distance from the row's number.
  __device__ __forceinline__ bool sees_distance(int distance) const {
    return (!causal || distance <= causal_offset) && (!windowed || distance >= window_offset);
  }

  // Whether a pair of these rows and keys is out of reach, or a tile of keys reaches past the end.
  // (The last row decides at the left end of a window, the first one at the right end.)
  __device__ __forceinline__ bool is_masked(int first_row, int rows, int first_key,
                                            int keys) const {
    if constexpr (!windowed) return first_key + keys > kv_end(first_row);
    return first_key + keys > kv_end(first_row) ||
           first_key < kv_begin(min(first_row + rows, M) - 1);
  }

  // The rows that see a key of first_key … first_key + keys - 1: row_begin … row_end - 1.
  __device__ __forceinline__ int row_begin(int first_key) const {
    if constexpr (causal)
      return int(max(0LL, min((long long)M, first_key - (long long)causal_offset)));
    return 0;
  }
  __device__ __forceinline__ int row_end(int first_key, int keys) const {
    const long long last_key = min(first_key + keys, N) - 1;
    if constexpr (windowed) return int(max(0LL, min((long long)M, last_key - window_offset + 1)));
    return M;
  }
};

// The geometry of a batch element; every kernel takes its sizes from here.
__device__ __forceinline__ Extent extent_of(const Sizes& sizes, [[maybe_unused]] int batch) {
  return {{}, {}, sizes.M, sizes.N, sizes.causal_offset, sizes.window_offset};
}

// The extent in launches that may be ragged, where masks are aligned for each batch element.
template <class Arrays>
__device__ __forceinline__ Extent extent_of(const Sizes& sizes, [[maybe_unused]] const Arrays& mods,
                                            int batch) {
  if constexpr (ragged) {
    const PackedRows rows = used_queries(mods, batch, sizes.M),
                     keys = used_keys(mods, batch, sizes.N);
    const int M = rows.count, N = keys.count;
    const long long position = Arrays::bottom_right ? N - M : 0;
    const int left = int(max((long long)-M, min((long long)N, position + sizes.window_offset)));
    int right = int(max(-1LL - M, min(position + sizes.causal_offset, max(N, 1) - 1LL)));
    if constexpr (windowed) right = max(right, left);
    Extent extent = {{}, {}, M, N, right, left};
    extent.begin_at(rows.first, keys.first);
    return extent;
  } else {
    return extent_of(sizes, batch);
  }
}

// The extent of one head, whose expressions, sink and dropout may be read.
__device__ __forceinline__ Extent extent_of(const Sizes& sizes, const Mods& mods, int batch,
                                            int head) {
  Extent extent = extent_of(sizes, mods, batch);
  extent.take(batch, head, extent.M, extent.N, mods);
  return extent;
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

// The keys `first` … `end` - 1 of a tile that a row sees, counted from the tile's first, without
// those that a mask expression hides. A row past the end sees none.
struct Seen {
  Extent extent;
  int row, first_key, first, end;

  __device__ __forceinline__ bool shows(int key) const {
    return extent.shown(row, first_key + key);
  }
  __device__ __forceinline__ real dropped(real p, int key) const {
    return extent.dropped(p, row, first_key + key);
  }
};

__device__ __forceinline__ Seen seen_in_tile(const Extent& extent, int row, int first_key,
                                             int keys) {
  const int first = windowed ? max(0, extent.kv_begin(row) - first_key) : 0;
  const int end = row < extent.M ? max(0, min(keys, extent.kv_end(row) - first_key)) : 0;
  return {extent, row, first_key, first, end};
}

// A tile of rows of one head, and the keys that some of its rows see. kv_begin is rounded down to
// the first key of a tile. From one tile of keys to the next goes after().
struct RowTile : TileMap<has_key_tiles>, PackedOrigin<packed> {
  int row, head, batch, kv_begin, kv_end;
};

template <int rows, int keys>
__device__ __forceinline__ RowTile row_tile(const Extent& extent, int row, int head, int batch) {
  const auto map = extent.key_tiles(row / rows);
  return {map,
          extent,
          row,
          head,
          batch,
          map.template from<keys>(extent.kv_begin(row) / keys * keys),
          extent.kv_end(min(row + rows, extent.M) - 1)};
}

// The last tile of `size` keys that a row sees. Tile 0 always counts, so that a row that sees no
// key is still written.
__device__ __forceinline__ int last_tile(int kv_end, int size) {
  return max(cdiv(kv_end, size), 1) - 1;
}

// A tile of rows and a tile of keys, as the backward kernels go through them.
template <int rows, int keys>
struct TilePair {
  Extent extent;
  int first_row, first_key;

  __device__ __forceinline__ bool sees(int row, int key) const {
    return extent.sees(first_row + row, first_key + key);
  }

  // The indices of a row and a key, for expressions.
  template <bool at_end = true>
  __device__ __forceinline__ Index row(int row, int more = 0) const {
    return index_of<at_end>(first_row + row, more, extent.M);
  }
  template <bool at_end>
  __device__ __forceinline__ Index key(int key, int more) const {
    return index_of<at_end>(first_key + key, more, extent.N);
  }

  __device__ __forceinline__ bool in_reach(int row, int key) const {
    return extent.in_reach(first_row + row, first_key + key);
  }
  // Whether mask expressions hide a pair.
  template <bool at_end>
  __device__ __forceinline__ bool hides(int row, int key, int more = 0) const {
    return extent.hides(this->row(row), this->key<at_end>(key, more));
  }

  // Whether all rows and keys of the tiles exist.
  __device__ __forceinline__ bool is_whole() const {
    return first_row + rows <= extent.M && first_key + keys <= extent.N;
  }

  // Whether a block mask is known to show all pairs.
  __device__ __forceinline__ bool is_full() const {
    if constexpr (has_row_tiles)
      return extent.row_tiles(first_key / keys).template is_full<rows>(first_row);
    else
      return extent.key_tiles(first_row / rows).template is_full<keys>(first_key);
  }
  // Whether every row sees every key, of those that exist; or may, if no expression hides it.
  __device__ __forceinline__ bool sees_all() const {
    return (!has_mask_mod || is_full()) && reaches_all();
  }
  __device__ __forceinline__ bool reaches_all() const {
    if constexpr (!causal && !windowed) return true;
    const int last_row = min(first_row + rows, extent.M) - 1;
    return extent.kv_end(first_row) >= min(first_key + keys, extent.N) &&
           extent.kv_begin(last_row) <= first_key;
  }
};
