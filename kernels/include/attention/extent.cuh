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

#include <attention/batch.cuh>
#include <attention/score_context.cuh>

// Whether a row may not see all keys of a tile that lie in the arrays.
constexpr bool has_mask = causal || windowed || has_mask_mod || ragged;

struct Extent : Context, BatchElement {
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

  // The mask of one pair.
  __device__ __forceinline__ bool sees(int row, int key, int more = 0) const {
    return in_reach(row, key) && shown(row, key, more);
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
  return {{}, {{}, sizes}};
}

template <class Arrays>
__device__ __forceinline__ Extent extent_of(const Sizes& sizes, const Arrays& mods, int batch) {
  return {{}, batch_element(sizes, mods, batch)};
}

// The extent of one head, whose expressions, sink and dropout may be read.
__device__ __forceinline__ Extent extent_of(const Sizes& sizes, const Mods& mods, int batch,
                                            int head) {
  Extent extent = extent_of(sizes, mods, batch);
  extent.take(batch, head, extent.M, extent.N, mods);
  return extent;
}

// A tile of rows of one head, and the keys that some of its rows see. kv_begin is rounded down to
// the first key of a tile. From one tile of keys to the next goes after().
struct RowTile : KeyTiles, Origin {
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
