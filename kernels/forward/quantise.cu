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

// That of a tile, and whether it has numbers that are not finite.
struct Found {
  float unit;
  bool strange;
};

template <int rows, int cols>
__device__ Found look_at(Shared& shared, Tensor<const scalar> from, int batch, int head,
                         int first_row, int end) {
  float largest = 0;
  bool strange = false;
  share_out<rows * cols, 8>([&](int i, int) {
    const int row = first_row + i / cols;
    const float x = row < end ? fabs(float(from.row(batch, head, row)[i % cols])) : 0.0f;
    if (x < infinity)
      largest = fmax(largest, x);
    else
      strange = true;
  });
  largest = block_max(largest, shared.partial);
  return {unit_for(largest), block_max(strange ? 1.0f : 0.0f, shared.partial) > 0};
}

__device__ __forceinline__ float scaled(scalar x, float factor) {
  const float value = float(x);
  return fabs(value) < infinity ? value * factor : __uint_as_float(0x7fffffff);
}

template <int rows, int cols>
__device__ void round_rows(Tensor<const scalar> from, Tensor<unsigned char> to, int batch, int head,
                           int first_row, int end, float factor) {
  constexpr int fours = cdiv(cols, 16) * 4;
  share_out<rows * fours, 4>([&](int i, int) {
    const int row = first_row + i / fours, col = i % fours * 4;
    if (row >= end) return;
    const scalar* x = from.row(batch, head, row);
    const auto at = [&](int j) { return j < cols ? scaled(x[j], factor) : 0.0f; };
    *reinterpret_cast<unsigned*>(to.row(batch, head, row) + col) =
        pack_e4m3(at(col), at(col + 1), at(col + 2), at(col + 3));
  });
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
    const float unit = look_at<Br, d>(shared, Q, of_batch, head, tile * Br, M).unit;
    const float sign = scale == 0 ? 0.0f : scale < 0 ? -1.0f : 1.0f;
    round_rows<Br, d>(Q, Q8, of_batch, head, tile * Br, M, sign / unit);
    if (threadIdx.x == 0) Q_scale[index] = unit;
  } else {
    const auto [tile, head, of_batch] = place(index - of_Q, cdiv(N, Bc), kv_heads);
    const float unit = look_at<Bc, d>(shared, K, of_batch, head, tile * Bc, N).unit;
    round_rows<Bc, d>(K, K8, of_batch, head, tile * Bc, N, 1 / unit);
    const Found of_V = look_at<Bc, dv>(shared, V, of_batch, head, tile * Bc, N);
    transpose_values(V, V8, of_batch, head, tile * Bc, N, 1 / of_V.unit);
    if (threadIdx.x == 0) {
      K_scale[index - of_Q] = unit;
      V_scale[index - of_Q] = of_V.strange ? -of_V.unit : of_V.unit;
    }
  }
}
