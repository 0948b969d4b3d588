// quantise: divides each tile of Q, K and V by a power of two, rounds it to e4m3, transposes V.
//
// The scale brings a tile's largest finite number to 224 … 448; 448 is the largest e4m3 number.
// Dividing by a power of two keeps all bits of the mantissa; only numbers 2^15 times smaller than
// the tile's largest become subnormal. Infinity becomes NaN, because e4m3 has no infinity.
//
// wgmma requires e4m3 operands that are contiguous along the summed dimension, so V is transposed.
// Within each 32 keys, the order is that in which a thread of wgmma_fp8 holds their P.
//
//   Q [batch, heads, M, d]    K, V [batch, kv_heads, N, d | dv]
//   Q8, K8 like Q, K, d padded to d16 with zeros    V8 [batch, kv_heads, dv, N32], also padded
//   Q_scale [batch, heads, cdiv(M, Br)]    K_scale, V_scale [batch, kv_heads, cdiv(N, Bc)]
//   grid (cdiv(M, Br) * heads * batch for Q, then cdiv(N, Bc) * kv_heads * batch each for K and V)
//   block (threads): one tile
//   the host sets: scalar, real, Br, Bc, d, dv, threads, shared_bytes
#include <ptx/e4m3.cuh>
#include <tile/block.cuh>
#include <tile/math.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>

constexpr int warps = threads / warp_size;
static_assert(threads % warp_size == 0, "shuffles need whole warps");

struct Shared {
  float partial[warps];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
constexpr int resident = sizeof(scalar) == 2 ? 1152 / threads : 1;  // blocks per multiprocessor
static_assert(Bc % 32 == 0, "keys are permuted within groups of 32");

// Convert between a number and its bits, which are the lowest bits of an unsigned integer.
__device__ __forceinline__ scalar as_scalar(unsigned bits) {
  scalar x;
  memcpy(&x, &bits, sizeof(scalar));
  return x;
}
__device__ __forceinline__ unsigned as_bits(scalar x) {
  unsigned bits = 0;
  memcpy(&bits, &x, sizeof(scalar));
  return bits;
}

// Returns the scale of a tile whose largest magnitude is `largest`.
__device__ __forceinline__ float unit_for(float largest) {
  // The addition carries into the exponent if the mantissa is above that of 448.
  const int exponent = int((__float_as_uint(largest) + 0x1fffff) >> 23) - 8;
  return __uint_as_float(unsigned(max(exponent, 1)) << 23);
}

// Neighbouring elements of a row, and zeros past its end. They stay packed until they are rounded,
// because floats would need twice the registers.
template <int count>
struct alignas(count < 8 ? count * sizeof(scalar) : 16) Piece {
  static constexpr int bits = 8 * sizeof(scalar), in_word = 32 / bits;
  unsigned words[count / in_word];

  // Returns the bits of an element's magnitude; as integers they sort like magnitudes, NaN last.
  __device__ __forceinline__ unsigned magnitude(int j) const {
    return words[j / in_word] >> j % in_word * bits & (1u << (bits - 1)) - 1;
  }
  __device__ __forceinline__ float operator[](int j) const {
    return float(as_scalar(words[j / in_word] >> j % in_word * bits));
  }
  __device__ __forceinline__ void put(int j, scalar x) {
    words[j / in_word] |= as_bits(x) << j % in_word * bits;
  }
};

// A tile in registers: each thread holds groups of `tall` rows and `wide` columns.
template <int rows, int cols, int tall, int wide>
struct Tile {
  static_assert(rows % tall == 0, "threads hold whole groups of rows");
  static constexpr int in_row = cdiv(cols, 16) * 16 / wide, groups = rows / tall * in_row;
  static constexpr int rounds = cdiv(groups, threads);
  int first_row, end;
  Piece<wide> pieces[rounds][tall];

  __device__ __forceinline__ Tile(Tensor<const scalar> from, int batch, int head, int first_row,
                                  int end)
      : first_row(first_row), end(min(first_row + rows, end)) {
    if (cols % 8 == 0 && is_aligned(from))
      load<true>(from, batch, head);
    else
      load<false>(from, batch, head);
  }

  // Loads pieces of `wide` elements at once if they are `aligned`, otherwise element by element.
  template <bool aligned>
  __device__ __forceinline__ void load(Tensor<const scalar> from, int batch, int head) {
    each([&](int row, int col, int round) {
      const scalar* x = from.row(batch, head, row) + col;
#pragma unroll
      for (int i = 0; i < tall; ++i, x += from.row_stride) {
        Piece<wide>& piece = pieces[round][i] = {};
        const int there = row + i < end ? cols - col : 0;
        if constexpr (aligned) {
          if (there > 0) piece = *reinterpret_cast<const Piece<wide>*>(x);
        } else {
#pragma unroll
          for (int j = 0; j < wide; ++j) {
            if (j < there) piece.put(j, x[j]);
          }
        }
      }
    });
  }

  // Calls body(row, col, round) for the first element of each group; surplus groups have rows past
  // the end. Groups of several rows: two neighbouring threads hold 32 rows of the same columns.
  template <class Body>
  __device__ __forceinline__ void each(Body body) const {
    constexpr int pair = tall > 1 ? 2 : 1;
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int i = round * threads + threadIdx.x, group = i / pair / in_row * pair + i % pair;
      body(first_row + group * tall, i / pair % in_row * wide, round);
    }
  }
};

// Returns the thread's largest magnitude, infinity if an element is NaN; or, if `finite`, the
// largest magnitude of its finite elements.
template <bool finite, int rows, int cols, int tall, int wide>
__device__ __forceinline__ float largest_of(const Tile<rows, cols, tall, wide>& tile) {
  const unsigned end = as_bits(scalar(infinity));
  unsigned largest = 0;
#pragma unroll
  for (const auto& group : tile.pieces) {
#pragma unroll
    for (const auto& piece : group) {
#pragma unroll
      for (int j = 0; j < wide; ++j) {
        const unsigned magnitude = piece.magnitude(j);
        largest = max(largest, finite && magnitude >= end ? 0 : magnitude);
      }
    }
  }
  return float(as_scalar(min(largest, end)));
}

// Returns the scale of a tile, derived from its largest finite magnitude.
template <class Tile>
__device__ __forceinline__ float unit_of(const Tile& tile, Shared& shared) {
  const float largest = block_max(largest_of<false>(tile), shared.partial);
  if (largest < infinity) return unit_for(largest);
  return unit_for(block_max(largest_of<true>(tile), shared.partial));
}

// Multiplies a number. The second term turns infinity into NaN, because infinity times 0 is NaN.
__device__ __forceinline__ float scaled(float x, float factor) {
  return x * factor + x * 0.0f;
}

// Scales a tile of Q or K by a power of two and rounds it to e4m3.
template <class Tile>
__device__ __forceinline__ void round_rows(const Tile& tile, Tensor<unsigned char> to, int batch,
                                           int head, float factor) {
  tile.each([&](int row, int col, int round) {
    if (row >= tile.end) return;
    const auto at = [&](int j) { return scaled(tile.pieces[round][0][j], factor); };
    const auto four = [&](int j) { return pack_e4m3(at(j), at(j + 1), at(j + 2), at(j + 3)); };
    *reinterpret_cast<uint2*>(to.row(batch, head, row) + col) = {four(0), four(4)};
  });
}

// Scales a tile of V by a power of two, rounds it to e4m3 and transposes it, 16 keys at a time.
__device__ __forceinline__ void transpose_values(const Tile<Bc, dv, 16, 2>& tile,
                                                 Tensor<unsigned char> to, int batch, int head,
                                                 float factor) {
  tile.each([&](int key, int col, int round) {
    if (key / 32 * 32 >= tile.end) return;  // rows of V8 end at a multiple of 32 keys
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (col + j >= dv) break;
      const auto at = [&](int i) { return scaled(tile.pieces[round][i][j], factor); };
      const auto four = [&](int i) { return pack_e4m3(at(i), at(i + 1), at(i + 8), at(i + 9)); };
      *reinterpret_cast<uint4*>(to.row(batch, head, col + j) + key) = {four(0), four(2), four(4),
                                                                       four(6)};
    }
  });
}

extern "C" __global__ __launch_bounds__(threads, resident) void quantise(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V,
    Tensor<unsigned char> Q8, Tensor<unsigned char> K8, Tensor<unsigned char> V8, float* Q_scale,
    float* K_scale, float* V_scale, int M, int N, int heads, int kv_heads, int batch) {
  Shared& shared = shared_memory<Shared>();
  const int of_Q = cdiv(M, Br) * heads * batch, of_K = cdiv(N, Bc) * kv_heads * batch;
  if (blockIdx.x < of_Q) {
    const int index = blockIdx.x;
    const auto [tile, head, of_batch] = place(index, cdiv(M, Br), heads);
    const Tile<Br, d, 1, 8> q(Q, of_batch, head, tile * Br, M);
    const float unit = unit_of(q, shared);
    round_rows(q, Q8, of_batch, head, 1 / unit);
    if (threadIdx.x == 0) Q_scale[index] = unit;
  } else if (blockIdx.x < of_Q + of_K) {
    const int index = blockIdx.x - of_Q;
    const auto [tile, head, of_batch] = place(index, cdiv(N, Bc), kv_heads);
    const Tile<Bc, d, 1, 8> k(K, of_batch, head, tile * Bc, N);
    const float unit = unit_of(k, shared);
    round_rows(k, K8, of_batch, head, 1 / unit);
    if (threadIdx.x == 0) K_scale[index] = unit;
  } else {
    const int index = blockIdx.x - of_Q - of_K;
    const auto [tile, head, of_batch] = place(index, cdiv(N, Bc), kv_heads);
    const Tile<Bc, dv, 16, 2> v(V, of_batch, head, tile * Bc, N);
    const float unit = unit_of(v, shared);
    transpose_values(v, V8, of_batch, head, 1 / unit);
    if (threadIdx.x == 0) V_scale[index] = unit;
  }
}
