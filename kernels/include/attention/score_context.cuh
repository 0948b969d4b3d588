#pragma once
// Where a pair of query and key is: what the texts that modify scores or hide pairs read besides
// the score; the sink of a head, a score that every row of it has besides those of its keys; and
// which weights dropout keeps.
// The host writes above every kernel has_score_mod, has_mask_mod, has_sink, has_dropout,
// reads_places (whether texts ask where a pair is), unit_slope (whether the derivative of the
// modified score is 1 wherever it is finite), caps_tiles (whether tensor cores' tiles of float go
// through a softcap ahead of the other texts), approximates_softcap (with an absolute error),
// of_products (whether texts take q·k and give a score / scale, which saves a multiplication) and
// struct Mods, which has the sinks, the arrays and numbers of texts, and the numbers of dropout. If
// there are any it includes score_mod.cuh, and for dropout dropout.cuh.

#include <attention/tile_map.cuh>
#include <tile/math.cuh>

struct Mods;
constexpr bool has_expressions = has_score_mod || has_mask_mod;
constexpr bool has_context = has_expressions || has_sink || has_dropout;

// The number of a query or key. `more` is what differs from element to element of a thread, a
// constant of an unrolled loop. So `base` is the same in a tile, and its conversion to a number,
// which has an eighth of the throughput of an addition, is made once; and `more` becomes the
// immediate offset of a load.
struct Index {
  int base, more;

  __device__ __forceinline__ Index(int base, int more = 0) : base(base), more(more) {}
  __device__ __forceinline__ operator int() const { return base + more; }
};

// The number of a key with an even base, so that keys 2 i and 2 i + 1 are known to be a pair.
struct EvenIndex : Index {
  using Index::Index;
};
// The number of a key, with what an array has for it: the first or second element of a pair.
struct HeldIndex : Index {
  unsigned pair;
  bool second;

  __device__ __forceinline__ HeldIndex(Index key, unsigned pair, bool second)
      : Index(key), pair(pair), second(second) {}
};

// The same of base + more, for texts, whose arrays may end at `count`.
template <bool at_end>
__device__ __forceinline__ Index index_of(int base, int more, [[maybe_unused]] int count) {
  return at_end ? Index(min(base + more, count - 1)) : Index(base, more);
}

// A score and d score / d (scale * q·k).
template <class T>
struct Scored {
  T score, slope;
};

// A head. Without texts, sinks and dropout nothing is kept.
template <bool used, class Arrays = Mods>
struct HeadContext {
  __device__ __forceinline__ void take(int, int, int, int, const Arrays&) {}
  __device__ __forceinline__ void move_to(int) {}
  template <class Products, class T>
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
