#pragma once
// Dropout. Whether a weight is kept depends only on its batch element, head, query and key, and on
// a seed and an offset. All kernels, whatever their tiles, the backward pass and NumPy
// (cupyfa/score/dropout.py) therefore agree. The host includes this header above a kernel with
// dropout. dropout_of(mods) then returns the member `dropout` of struct Mods with its seed and
// offset. These may lie in device memory, so that a captured graph reads them in every launch.
//
// Philox 4x32-7 turns a counter into 128 bits (Salmon et al., 2011, doi:10.1145/2063384.2063405; 7
// rounds are the fewest that pass BigCrush). One call serves 8 query-key pairs with 14 bits each:
// queries q and q + 8 with keys k, k + 1, k + 8 and k + 9, where bit 3 of q and bits 0 and 3 of k
// are 0. A lane holds these pairs in a fragment (mma.cuh), and half of them in a transposed one.
// Each word serves two neighbouring keys, which share a register of the next product's operand.

#include <ptx/at_least.cuh>
#include <ptx/pack.cuh>
#include <tile/warp.cuh>

struct Mods;
constexpr int patch = 16;  // rows and keys that one call of Philox per lane covers
constexpr int philox_rounds = 7;

struct Bits {
  unsigned words[4];

  // Returns the word of a query-key pair; an odd key uses the upper half.
  __device__ __forceinline__ unsigned word(int query, int key) const {
    const bool lower = query >> 3 & 1;
    return key >> 3 & 1 ? words[lower ? 3 : 2] : words[lower ? 1 : 0];
  }
};

// Computes Philox 4x32-7 of the counter (x, y, z, w).
__device__ __forceinline__ Bits philox(unsigned x, unsigned y, unsigned z, unsigned w,
                                       const unsigned (&round_keys)[2 * philox_rounds]) {
#pragma unroll
  for (int i = 0; i < 2 * philox_rounds; i += 2) {
    const unsigned long long a = 0xD2511F53ull * x, b = 0xCD9E8D57ull * z;
    x = unsigned(b >> 32) ^ y ^ round_keys[i], y = unsigned(b);
    z = unsigned(a >> 32) ^ w ^ round_keys[i + 1], w = unsigned(a);
  }
  return {{x, y, z, w}};
}

struct Dropout {
  unsigned round_keys[2 * philox_rounds];  // derived from the seed
  unsigned offset;
  unsigned least;  // 2^14 * drop probability, in both halves of the word
  int heads;
  real factor;  // 1 / (1 - probability)

  __device__ __forceinline__ void take_seed(unsigned long long seed) {
#pragma unroll
    for (unsigned i = 0; i < philox_rounds; ++i) {
      round_keys[2 * i] = unsigned(seed) + i * 0x9E3779B9u;
      round_keys[2 * i + 1] = unsigned(seed >> 32) + i * 0xBB67AE85u;
    }
  }

  __device__ __forceinline__ Bits bits(int batch, int head, int query, int key) const {
    return philox(unsigned(key) & ~9u, unsigned(query) & ~8u, unsigned(batch * heads + head),
                  offset, round_keys);
  }
  __device__ __forceinline__ bool keeps(unsigned word, bool upper) const {
    return word << (upper ? 2 : 18) >= least << 18;
  }
  __device__ __forceinline__ bool keeps(int batch, int head, int query, int key) const {
    return keeps(bits(batch, head, query, key).word(query, key), key & 1);
  }
  // Returns all ones in each half whose key is kept.
  __device__ __forceinline__ unsigned kept_halves(unsigned word) const {
    return halves_at_least(word & 0x3fff3fff, least);
  }
};

// Returns a lane's words for 16 rows and 16 keys: the words of `row` and `row` + 8, first for the
// lane's keys below 8, then for its keys from 8 on. Place is an Extent. With packed GQA, row r is
// query r / heads of head r % heads.
template <int heads, class Place>
__device__ __forceinline__ Bits bits_of(const Dropout& dropout, const Place& place, int row,
                                        int key) {
  if constexpr (heads == 1) {
    return dropout.bits(place.batch, place.head, row, key);
  } else {
    Bits found;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = (row + half * 8) / heads, more = (row + half * 8) % heads;
      const Bits bits = dropout.bits(place.batch, place.head + more, query, key);
      found.words[half] = bits.word(query, 0), found.words[2 + half] = bits.word(query, 8);
    }
    return found;
  }
}

// Calls body(i, n, e, kept) for a lane's weights [i][n][e] in the j-th group of 16 keys, n = 2 * j
// and 2 * j + 1. `row` and `key` are the lane's first row and key.
template <int heads = 1, int m, int n, class Place, class Body>
__device__ __forceinline__ void for_keys(const real (&)[m][n][4], int j, const Place& place,
                                         int row, int key, Body body) {
  static_assert(n % 2 == 0, "bits are for 16 keys");
  const auto& dropout = dropout_of(place.mods);
  key += j * patch;
#pragma unroll
  for (int i = 0; i < m; ++i, row += patch) {
    const Bits bits = bits_of<heads>(dropout, place, row, key);
#pragma unroll
    for (int e = 0; e < 8; ++e)
      body(i, 2 * j + e / 4, e % 4, dropout.keeps(bits.words[e / 2], e % 2 == 1));
  }
}

// Calls body like for_keys(), for all groups of 16 keys.
template <int m, int n, class Place, class Body>
__device__ __forceinline__ void for_weights(const real (&weights)[m][n][4], const Place& place,
                                            int row, int key, Body body) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) for_keys(weights, j, place, row, key, body);
}

// Calls body(i, kept) for a lane's elements of a transposed product: keys k and k + 8, and two of
// every 8 rows. Lanes l and l ^ 4 hold neighbouring keys. Each computes the bits of one of the two
// rows, and they exchange the halves that belong to the other lane's key.
template <int count, class Place, class Body>
__device__ __forceinline__ void for_transposed(const real (&)[count], const Place& place, int row,
                                               int key, Body body) {
  static_assert(count % 8 == 0, "bits are for 16 rows");
  const auto& dropout = dropout_of(place.mods);
  const bool odd = key & 1;
#pragma unroll
  for (int first = 0; first < count; first += 8) {
    const Bits bits = dropout.bits(place.batch, place.head, row + first * 2 + odd, key);
    unsigned words[2][2];  // element i: [i % 2][i / 4]; key + 8 uses the upper half
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const unsigned near = bits.words[next], far = bits.words[2 + next];
      const unsigned even = near & 0xffff | far << 16, of_odd = near >> 16 | far & 0xffff0000;
      const unsigned own = odd ? of_odd : even;
      const unsigned other = __shfl_xor_sync(full_warp, odd ? even : of_odd, 4);
      words[0][next] = odd ? other : own;
      words[1][next] = odd ? own : other;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) body(first + i, dropout.keeps(words[i % 2][i / 4], i / 2 % 2 == 1));
  }
}

// Zeroes dropped weights in the packed A operands of P V: 16 rows, and 16 keys per step. A register
// holds two neighbouring keys.
template <int steps, class Rows>
__device__ __forceinline__ void drop_operands(unsigned (&P)[steps][4], const Rows& rows,
                                              int first_key) {
  const auto& dropout = dropout_of(rows.extent.mods);
  const int own_key = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int k = 0; k < steps; ++k) {
    const Bits bits = bits_of<Rows::heads>(dropout, rows.extent, rows.first, own_key + k * patch);
#pragma unroll
    for (int i = 0; i < 4; ++i) P[k][i] &= dropout.kept_halves(bits.words[i]);
  }
}

// Calls body(i, j, e) for each dropped weight in groups `first` to `end` - 1 of 16 keys. The
// weights are not packed yet.
template <int m, int n, class Rows, class Body>
__device__ __forceinline__ void for_dropped_weights(const real (&P)[m][n][4], int first, int end,
                                                    const Rows& rows, int first_key, Body body) {
#pragma unroll
  for (int group = first; group < end; ++group)
    for_keys<Rows::heads>(P, group, rows.extent, rows.first, first_key + 2 * (threadIdx.x % 4),
                          [&](int i, int j, int e, bool kept) {
                            if (!kept) body(i, j, e);
                          });
}

// The backward pass also applies dropout to dP, which is complete only later. Until then PS, P
// times the derivative of the score modification, stores whether the weight is kept: in its sign
// where the slope is 1, since P is never negative, else in its last bit, below the rounding error.
template <int bytes>
struct WordOf {
  using Type = unsigned;
};
template <>
struct WordOf<8> {
  using Type = unsigned long long;
};
using Word = WordOf<sizeof(real)>::Type;

__device__ __forceinline__ real marked(real PS, bool kept) {
  if constexpr (unit_slope) return kept ? PS : -PS;
  return __builtin_bit_cast(real, (__builtin_bit_cast(Word, PS) & ~Word(1)) | Word(kept));
}
__device__ __forceinline__ bool is_kept(real PS) {
  return unit_slope ? !(PS < 0) : __builtin_bit_cast(Word, PS) & 1;
}
// Returns PS without its mark. Where results are float16, the last bit may stay: it rounds to 0. In
// bfloat16 and wider results it would make gradients of hidden pairs nonzero.
__device__ __forceinline__ real unmarked(real PS) {
  if constexpr (unit_slope) return fabs(PS);
  if constexpr (is_half<result>) return PS;
  return __builtin_bit_cast(real, __builtin_bit_cast(Word, PS) & ~Word(1));
}

template <int m, int n, class Place>
__device__ __forceinline__ void mark_weights(real (&PS)[m][n][4], const Place& place, int row,
                                             int key) {
  for_weights(PS, place, row, key,
              [&](int i, int j, int e, bool kept) { PS[i][j][e] = marked(PS[i][j][e], kept); });
}
template <int count, class Place>
__device__ __forceinline__ void mark_weights(real (&PS)[count], const Place& place, int row,
                                             int key) {
  mark_weights(reinterpret_cast<real(&)[1][count / 4][4]>(PS), place, row, key);
}
// Marks PS(i, j, e) like mark_weights(), and zeroes dropped weights in P.
template <int m, int n, class Place, class Elements>
__device__ __forceinline__ void mark_and_drop(real (&P)[m][n][4], const Place& place, int row,
                                              int key, Elements PS) {
  for_weights(P, place, row, key, [&](int i, int j, int e, bool kept) {
    PS(i, j, e) = marked(PS(i, j, e), kept);
    if (!kept) P[i][j][e] = 0;
  });
}
template <int count, class Place>
__device__ __forceinline__ void mark_transposed(real (&PS)[count], const Place& place, int row,
                                                int key) {
  for_transposed(PS, place, row, key, [&](int i, bool kept) { PS[i] = marked(PS[i], kept); });
}

// Returns the weight P of a marked PS, or 0 if it is dropped.
__device__ __forceinline__ real kept_weight(real P, real PS) {
  return is_kept(PS) ? (unit_slope ? PS : P) : real(0);
}
template <int count>
__device__ __forceinline__ void drop_unmarked(real (&P)[count], const real (&PS)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) P[i] = kept_weight(P[i], PS[i]);
}
template <int m, int n>
__device__ __forceinline__ void drop_unmarked(real (&P)[m][n][4], const real (&PS)[m][n][4]) {
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) {
    real& p = P[i / (4 * n)][i / 4 % n][i % 4];
    p = kept_weight(p, PS[i / (4 * n)][i / 4 % n][i % 4]);
  }
}
