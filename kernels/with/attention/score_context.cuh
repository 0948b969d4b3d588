#pragma once
// What a score depends on besides q·k and the scale: the batch element and head of expressions, the
// head's attention sink (one extra score per row), and the weights that dropout keeps.
//
// The host defines these options above every kernel:
//   has_score_mod, has_mask_mod, has_sink, has_dropout, has_row_max
//   reads_places           expressions read indices or arrays
//   unit_slope             the derivative of the modified score is 1 wherever it is finite
//   caps_tiles             tensor-core kernels in float apply a softcap before other expressions
//   approximates_softcap   that softcap has an absolute, not a relative, error bound
//   of_products            expressions map q·k to score / scale, which saves a multiplication
// Struct Mods has the sinks, and the arrays and numbers of expressions and dropout. The host
// includes score_mod.cuh and dropout.cuh where needed.

#include <attention/tile_map.cuh>
#include <tile/math.cuh>

struct Mods;
constexpr bool has_expressions = has_score_mod || has_mask_mod;
constexpr bool has_context = has_expressions || has_sink || has_dropout || has_row_max;

// The index of a query or key. `more` differs between a thread's elements and is a constant in an
// unrolled loop. So `base` is converted to float once per tile (a conversion has an eighth of an
// addition's throughput), and `more` becomes the immediate offset of a load.
struct Index {
  int base, more;

  __device__ __forceinline__ Index(int base, int more = 0) : base(base), more(more) {}
  __device__ __forceinline__ operator int() const { return base + more; }
};

// The index of a key with an even base, so that keys 2 i and 2 i + 1 are known to form a pair.
struct EvenIndex : Index {
  using Index::Index;
};
// A key's index together with its element of a staged array: the first or second one of a pair.
struct HeldIndex : Index {
  unsigned pair;
  bool second;

  __device__ __forceinline__ HeldIndex(Index key, unsigned pair, bool second)
      : Index(key), pair(pair), second(second) {}
};

// Returns the index base + more; in a tile `at_end` clamped to count - 1, where arrays may end.
template <bool at_end>
__device__ __forceinline__ Index index_of(int base, int more, [[maybe_unused]] int count) {
  return at_end ? Index(min(base + more, count - 1)) : Index(base, more);
}

// A score and its derivative with respect to scale * q·k.
template <class T>
struct Scored {
  T score, slope;
};

// The batch element and head of a score; empty without expressions, sinks or dropout.
template <bool used, class Arrays = Mods>
struct HeadContext {
  __device__ __forceinline__ void take(int, int, int, int, const Arrays&) {}
  template <bool = false, class Products, class T>
  __device__ __forceinline__ void cap(Products&, T) const {}
  template <bool is_capped = false, class T, class Key>
  __device__ __forceinline__ T modified(T score, Index, Key, int) const {
    return score;
  }
  template <bool is_capped = false, class T, class Key>
  __device__ __forceinline__ Scored<T> with_slope(T score, Index, Key) const {
    return {score, T(1)};
  }
  template <class Key>
  __device__ __forceinline__ bool shows(Index, Key, int) const {
    return true;
  }
  __device__ __forceinline__ real sink(int = 0) const { return -infinity; }
  template <class T>
  __device__ __forceinline__ T dropped(T x, int, int) const {
    return x;
  }
  __device__ __forceinline__ real kept_factor() const { return 1; }
  __device__ __forceinline__ TileMap<false> key_tiles(int) const { return {}; }
  __device__ __forceinline__ TileMap<false> row_tiles(int) const { return {}; }
  __device__ __forceinline__ int longest(int, int rank) const { return rank; }
};

using Context = HeadContext<has_context>;
using KeyTiles = TileMap<has_key_tiles>;

// Returns the extent of another head; without expressions, sinks and dropout it is not copied.
template <class Extent>
__device__ __forceinline__ auto extent_of_head(const Extent& extent, [[maybe_unused]] int head)
    -> decltype(auto) {
  if constexpr (has_context) {
    Extent moved = extent;
    moved.move_to(head);
    return moved;
  } else {
    return (extent);
  }
}
