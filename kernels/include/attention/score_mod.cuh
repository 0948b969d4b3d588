#pragma once
// Applies expressions and reads sinks. The host includes this header above a kernel and generates
// struct Mods and two functions:
//
//   score_mod(Capped<is_capped>(), score, mods, batch, head, query, key, queries, keys)
//                                     the modified score; is_capped: the softcap has been applied
//   mask_mod(mods, batch, head, query, key, queries, keys)            whether the pair is visible

#include <attention/expression.cuh>
#include <tile/warp.cuh>

template <bool is_capped>
struct Capped {};

// Returns a head's sink from an array [heads] or [batch, heads].
template <class Element>
__device__ __forceinline__ real sink_of(const Array<Element, 1>& sinks, int, int head) {
  return sinks.read(head).value;
}
template <class Element>
__device__ __forceinline__ real sink_of(const Array<Element, 2>& sinks, int batch, int head) {
  return sinks.read(batch, head).value;
}

template <class Arrays>
struct HeadContext<true, Arrays> {
  int batch, head, queries, keys;
  Arrays mods;

  __device__ __forceinline__ void take(int batch, int head, int queries, int keys,
                                       const Arrays& mods) {
    *this = {batch, head, queries, keys, mods};
  }
  __device__ __forceinline__ void move_to(int head) { this->head = head; }

  // Applies the softcap to a lane's products, if the kernel caps whole tiles.
  template <bool approximates = approximates_softcap, class T, int count>
  __device__ __forceinline__ void cap(T (&products)[count], [[maybe_unused]] T scale) const {
    if constexpr (approximates)
      elementary::cap_approximately(products, scale, mods.softcap_);
    else if constexpr (caps_tiles)
      elementary::cap_products(products, scale, mods.softcap_);
  }
  // With packed GQA, `more` is the head's distance from the first head of the tile.
  template <bool is_capped = false, class T, class Key>
  __device__ __forceinline__ T modified(T score, Index query, Key key, int more) const {
    return score_mod(Capped<is_capped>(), Real(score), mods, batch, head + more, query, key,
                     queries, keys)
        .value;
  }
  template <bool is_capped = false, class T, class Key>
  __device__ __forceinline__ Scored<T> with_slope(T score, Index query, Key key) const {
    if constexpr (unit_slope) return {modified(score, query, key, 0), T(1)};
    Dual<1> x(score);
    x.slope[0] = 1;
    if constexpr (is_capped) {
      const real share = elementary::divide(real(score), mods.softcap_);
      x.slope[0] = 1 - share * share;
    }
    const Dual<1> y =
        score_mod(Capped<is_capped>(), x, mods, batch, head, query, key, queries, keys);
    return {T(y.value), T(y.slope[0])};
  }
  template <class Key>
  __device__ __forceinline__ bool shows(Index query, Key key, int more) const {
    return mask_mod(mods, batch, head + more, query, key, queries, keys);
  }
  // Returns the block mask's key tiles of a row tile; row_tiles() the row tiles of a key tile.
  __device__ __forceinline__ TileMap<has_key_tiles> key_tiles([[maybe_unused]] int tile) const {
    if constexpr (has_key_tiles)
      return {line_of(mods.key_tiles_, tile)};
    else
      return {};
  }
  __device__ __forceinline__ TileMap<has_row_tiles> row_tiles([[maybe_unused]] int tile) const {
    if constexpr (has_row_tiles)
      return {line_of(mods.row_tiles_, tile)};
    else
      return {};
  }
  // Returns the row tile with this rank by decreasing length; `tiles` is the number of key tiles.
  __device__ __forceinline__ int longest([[maybe_unused]] int tiles, int rank) const {
    if constexpr (has_key_tiles) return key_tiles(rank).line[tiles + 1];
    return rank;
  }
  template <class Map>
  __device__ __forceinline__ const int* line_of(const Map& map, int tile) const {
    return map.data + (batch * map.stride[0] + head * map.stride[1] + tile * map.stride[2]);
  }
  // Returns the head's sink, or -infinity if there is none.
  __device__ __forceinline__ real sink(int more = 0) const {
    if constexpr (has_sink) return sink_of(mods.sink_, batch, head + more);
    return -infinity;
  }
  // Stores the largest score of a row if the call requests it.
  __device__ __forceinline__ void store_row_max([[maybe_unused]] int row, [[maybe_unused]] int more,
                                                [[maybe_unused]] real score) const {
    if constexpr (has_row_max) {
      const auto& to = mods.row_max_;
      to.at(packed ? 0 : batch, head + more, row) = score;
    }
  }
  // Applies dropout to a weight or its gradient: returns 0, or x times the factor of kept weights.
  template <class T>
  __device__ __forceinline__ T dropped(T x, int query, int key) const {
    if constexpr (has_dropout)
      return dropout_of(mods).keeps(batch, head, query, key) ? x * T(mods.dropout.factor) : T(0);
    return x;
  }
  // Returns the factor of kept weights.
  __device__ __forceinline__ real kept_factor() const {
    if constexpr (has_dropout) return mods.dropout.factor;
    return 1;
  }
};

// Returns the index of a lane's j-th key.
template <bool at_end, class Bias>
__device__ __forceinline__ auto key_of(int even, int j, const Bias& bias,
                                       [[maybe_unused]] const typename Bias::Part& part,
                                       int count) {
  const int more = j / 2 * 8 + j % 2;
  if constexpr (Bias::is_used)
    return bias.index(index_of<at_end>(even, more, count), part, j);
  else if constexpr (at_end)
    return index_of<true>(even, more, count);
  else
    return EvenIndex(even, more);
}

// Applies expressions to a lane's products in a key tile, and masks hidden pairs with -infinity if
// `hides`. A lane holds pairs of neighbouring keys.
template <bool at_end, bool hides, class Scorer, class T, int m, int n, class Rows, class Bias>
__device__ __forceinline__ void apply_expressions(const Scorer& scorer, T (&products)[m][n][4],
                                                  const Rows& rows, int first_key,
                                                  const Bias& bias) {
  const int own_key = first_key + 2 * (threadIdx.x % warp_size % 4);
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = rows.existing(i / 2, i % 2);
    typename Bias::Part part;
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      if (j % 8 == 0) part = bias.part(i, j);
      T& x = products[i / 2][j / 2][i % 2 * 2 + j % 2];
      const auto key = key_of<at_end>(own_key, j, bias, part, rows.extent.N);
      const int query = row / rows.heads, more = row % rows.heads;
      x = scorer.template applied<caps_tiles>(x, rows.extent, query, key, more);
      if (hides && rows.extent.hides(query, key, more)) x = -infinity;
    }
  }
}
template <bool hides, class Scorer, class T, int m, int n, class Rows, class Bias>
__device__ __forceinline__ void apply_expressions(const Scorer& scorer, T (&products)[m][n][4],
                                                  const Rows& rows, int first_key,
                                                  const Bias& bias) {
  rows.extent.cap(reinterpret_cast<T(&)[m * n * 4]>(products), scorer.scale);
  if (reads_places && first_key + n * 8 > rows.extent.N)
    apply_expressions<true, hides>(scorer, products, rows, first_key, bias);
  else
    apply_expressions<false, hides>(scorer, products, rows, first_key, bias);
}

// Initialises rows, whose sums are 0, with their sinks. One of the four lanes of a row sets the sum
// to the sink's term: 1, or NaN if the sink is NaN or infinite, so that the row is recomputed.
template <class Rows>
__device__ __forceinline__ void begin_with_sinks(Rows& rows, bool takes_sink) {
  if (!takes_sink) return;
  constexpr int pairs = sizeof(rows.sum) / sizeof(rows.sum[0]);
#pragma unroll
  for (int i = 0; i < 2 * pairs; ++i) {
    const real sink = rows.extent.sink((rows.first + i * 8) % rows.heads);
    if (sink == -infinity) continue;
    real& lowest = rows.maximum[i / 2][i % 2];
    lowest = fmax(sink * log2e, lowest);
    if (threadIdx.x % 4 == 0) rows.sum[i / 2][i % 2] = sink - sink + 1;
  }
}
