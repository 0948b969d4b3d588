// quantise: Q, K and V as e4m3, each tile divided by a power of two, and V transposed.
//
// Of a tile the largest finite number comes to lie between 224 and 448, where e4m3 ends. A power of
// two takes nothing from a number's three bits of mantissa: what is 2^15 times smaller than the
// largest of its tile begins to lose some. In Q and K infinity becomes NaN, for e4m3 has none. In V
// both become 0, so that a key which is masked does no harm, and its tile's scale is negative. Q
// also takes the sign of the scale, or its being 0.
//
// Products of e4m3 take both operands by rows, so V is transposed; and 32 keys stand in the order
// in which a thread of wgmma_fp8 has their weights.
//
//   Q [batch, heads, M, d]    K, V [batch, kv_heads, N, d | dv]
//   Q8, K8 the same, d filled up to d16 with zeros    V8 [batch, kv_heads, dv, N32] likewise
//   Q_scale [batch, heads, cdiv(M, Br)]    K_scale, V_scale [batch, kv_heads, cdiv(N, Bc)]
//   grid (cdiv(M, Br) * heads * batch for Q, then cdiv(N, Bc) * kv_heads * batch for K and V)
//   block (threads): a tile
//   the host sets: scalar, real, Br, Bc, d, dv, threads, shared_bytes
#include <block.cuh>
#include <e4m3.cuh>
#include <math.cuh>
#include <shared.cuh>
#include <tensor.cuh>
#include <tile.cuh>

struct Shared {
  float partial[warps];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc % 32 == 0, "keys change their order within 32");

// The power of two by which a tile is divided whose numbers are not larger than this one.
__device__ __forceinline__ float unit_for(float largest) {
  // The addition carries into the exponent where the mantissa is above that of 448.
  const int exponent = int((__float_as_uint(largest) + 0x1fffff) >> 23) - 8;
  return __uint_as_float(unsigned(max(exponent, 1)) << 23);
}

// Eight neighbours of a row; zeros where there are none.
struct alignas(16) Eight {
  scalar x[8];
};

// A thread's share of a tile, as it is in memory.
template <int rows, int cols>
struct Tile {
  static constexpr int in_row = cdiv(cols, 16) * 2, turns = cdiv(rows * in_row, threads);
  Eight eights[turns];

  __device__ __forceinline__ Tile(Tensor<const scalar> from, int batch, int head, int first_row,
                                  int end) {
    const bool aligned = cols % 8 == 0 && is_aligned(from);
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
      const int i = turn * threads + threadIdx.x, row = first_row + i / in_row;
      const int col = i % in_row * 8;
      const bool inside = i < rows * in_row && row < end;
      const scalar* x = from.row(batch, head, inside ? row : 0) + col;
      if (inside && aligned && col < cols) {
        eights[turn] = *reinterpret_cast<const Eight*>(x);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          eights[turn].x[j] = inside && col + j < cols ? x[j] : scalar(0.0f);
      }
    }
  }
};

// The scale of a tile, and whether it has numbers that are not finite.
struct Found {
  float unit;
  bool strange;
};

template <int rows, int cols>
__device__ Found look_at(const Tile<rows, cols>& tile, Shared& shared) {
  float largest = 0;
  bool strange = false;
#pragma unroll
  for (const Eight& eight : tile.eights) {
#pragma unroll
    for (const scalar& element : eight.x) {
      const float x = fabs(float(element));
      strange |= !(x < infinity);
      largest = fmax(largest, x < infinity ? x : 0.0f);
    }
  }
  largest = block_max(largest, shared.partial);
  return {unit_for(largest), block_max(strange ? 1.0f : 0.0f, shared.partial) > 0};
}

__device__ __forceinline__ float scaled(scalar x, float factor) {
  const float value = float(x);
  return fabs(value) < infinity ? value * factor : __uint_as_float(0x7fffffff);
}

template <int rows, int cols>
__device__ void round_rows(const Tile<rows, cols>& tile, Tensor<unsigned char> to, int batch,
                           int head, int first_row, int end, float factor) {
#pragma unroll
  for (int turn = 0; turn < tile.turns; ++turn) {
    const int i = turn * threads + threadIdx.x, row = first_row + i / tile.in_row;
    if (i >= rows * tile.in_row || row >= end) continue;
    const scalar(&x)[8] = tile.eights[turn].x;
    const auto pack = [&](int j) {
      return pack_e4m3(scaled(x[j], factor), scaled(x[j + 1], factor), scaled(x[j + 2], factor),
                       scaled(x[j + 3], factor));
    };
    *reinterpret_cast<uint2*>(to.row(batch, head, row) + i % tile.in_row * 8) = {pack(0), pack(4)};
  }
}

// A thread transposes 32 keys of a column.
__device__ void transpose_values(Tensor<const scalar> from, Tensor<unsigned char> to, int batch,
                                 int head, int first_key, int N, float factor) {
  share_out<Bc / 32 * dv, 1>([&](int i, int) {
    const int first = first_key + i / dv * 32, col = i % dv;
    if (first >= N) return;
    const auto at = [&](int key) {
      const float value = key < N ? float(from.row(batch, head, key)[col]) : 0.0f;
      return fabs(value) < infinity ? value * factor : 0.0f;
    };
    uint4* keys = reinterpret_cast<uint4*>(to.row(batch, head, col) + first);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = first + half * 16 + j * 2;
        four[j] = pack_e4m3(at(key), at(key + 1), at(key + 8), at(key + 9));
      }
      keys[half] = {four[0], four[1], four[2], four[3]};
    }
  });
}

extern "C" __global__ __launch_bounds__(threads) void quantise(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V,
    Tensor<unsigned char> Q8, Tensor<unsigned char> K8, Tensor<unsigned char> V8, float* Q_scale,
    float* K_scale, float* V_scale, int M, int N, int heads, int kv_heads, int batch, real scale) {
  Shared& shared = shared_memory<Shared>();
  const int index = blockIdx.x, of_Q = cdiv(M, Br) * heads * batch;
  if (index < of_Q) {
    const auto [tile, head, of_batch] = place(index, cdiv(M, Br), heads);
    const Tile<Br, d> q(Q, of_batch, head, tile * Br, M);
    const float unit = look_at(q, shared).unit;
    const float sign = scale == 0 ? 0.0f : scale < 0 ? -1.0f : 1.0f;
    round_rows(q, Q8, of_batch, head, tile * Br, M, sign / unit);
    if (threadIdx.x == 0) Q_scale[index] = unit;
  } else {
    const auto [tile, head, of_batch] = place(index - of_Q, cdiv(N, Bc), kv_heads);
    const Tile<Bc, d> k(K, of_batch, head, tile * Bc, N);
    const float unit = look_at(k, shared).unit;
    round_rows(k, K8, of_batch, head, tile * Bc, N, 1 / unit);
    const Tile<Bc, dv> v(V, of_batch, head, tile * Bc, N);
    const Found of_V = look_at(v, shared);
    transpose_values(V, V8, of_batch, head, tile * Bc, N, 1 / of_V.unit);
    if (threadIdx.x == 0) {
      K_scale[index - of_Q] = unit;
      V_scale[index - of_Q] = of_V.strange ? -of_V.unit : of_V.unit;
    }
  }
}
