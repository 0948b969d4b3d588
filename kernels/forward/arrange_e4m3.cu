// arrange_e4m3: Q, K and V of e4m3 as wgmma_fp8 takes them, and their scales; for others there is
// quantise.
//
// Numbers stay as they are: what tensor cores multiply is exact. The sign of a head's descale goes
// into its numbers, and its size is the scale of all their tiles. A descale of infinity or NaN
// makes the numbers NaN, and so their rows are computed again. V is transposed; each 32 keys have
// the order in which a thread of wgmma_fp8 holds their P.
//
//   Q [batch, heads, M, d]    K, V [batch, kv_heads, N, d | dv]
//   Q8, K8, V8 and Q_scale, K_scale, V_scale as quantise.cu has them
//   grid (cdiv(M, Br) * heads * batch for Q, then cdiv(N, Bc) * kv_heads * batch for K, and for V)
//   block (threads): a tile
//   the host sets: Br, Bc, d, dv, threads, shared_bytes and what descales.cuh says
#include <attention/descales.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");
static_assert(Bc % 32 == 0, "keys change their order within 32");

// Neighbouring numbers of a row, four in a word, the first in the lowest bits.
template <int count>
struct alignas(count) Bytes {
  unsigned words[count / 4];
};

// Those from a column on, 0 past the end of the row.
template <int cols, int count>
__device__ __forceinline__ Bytes<count> load(const E4m3* row, int col, bool aligned) {
  if (aligned && col + count <= cols) return *reinterpret_cast<const Bytes<count>*>(row + col);
  Bytes<count> x = {};
#pragma unroll
  for (int j = 0; j < count; ++j) {
    if (col + j < cols) x.words[j / 4] |= unsigned(row[col + j].bits) << j % 4 * 8;
  }
  return x;
}

// What a descale does to the numbers of a head, and their scale.
struct Change {
  unsigned sign, nan;
  float scale;

  __device__ __forceinline__ explicit Change(float descale)
      : sign(descale < 0 ? 0x80808080 : 0),
        nan(fabs(descale) < infinity ? 0 : 0x7f7f7f7f),
        scale(fabs(descale)) {}
  __device__ __forceinline__ unsigned operator()(unsigned four) const { return four ^ sign | nan; }
};

template <int rows, int cols>
__device__ __forceinline__ void copy_rows(Tensor<const E4m3> from, Tensor<unsigned char> to,
                                          int batch, int head, int first_row, int end,
                                          const Change& change) {
  constexpr int in_row = cdiv(cols, 16);
  const bool aligned = is_aligned(from);
  for (int i = threadIdx.x; i < rows * in_row; i += threads) {
    const int row = first_row + i / in_row, col = i % in_row * 16;
    if (row >= end) return;
    Bytes<16> x = load<cols, 16>(from.row(batch, head, row), col, aligned);
#pragma unroll
    for (unsigned& four : x.words) four = change(four);
    *reinterpret_cast<Bytes<16>*>(to.row(batch, head, row) + col) = x;
  }
}

// The number of four of a word, in the lowest bits.
__device__ __forceinline__ unsigned byte_of(unsigned four, int j) {
  return four >> j * 8 & 0xff;
}

// A thread has 16 keys of four columns, two neighbouring threads 32 keys of the same columns.
__device__ __forceinline__ void transpose_values(Tensor<const E4m3> from, Tensor<unsigned char> to,
                                                 int batch, int head, int first_key, int end,
                                                 const Change& change) {
  constexpr int in_row = cdiv(dv, 4);
  const bool aligned = is_aligned(from);
  for (int i = threadIdx.x; i < Bc / 16 * in_row; i += threads) {
    const int key = first_key + i / 2 / in_row * 32 + i % 2 * 16, col = i / 2 % in_row * 4;
    if (key / 32 * 32 >= end) return;  // rows of V8 end where 32 keys do
    unsigned rows[16];
#pragma unroll
    for (int k = 0; k < 16; ++k)
      rows[k] =
          key + k < end ? load<dv, 4>(from.row(batch, head, key + k), col, aligned).words[0] : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (col + j >= dv) break;
      const auto four = [&](int k) {
        return change(byte_of(rows[k], j) | byte_of(rows[k + 1], j) << 8 |
                      byte_of(rows[k + 8], j) << 16 | byte_of(rows[k + 9], j) << 24);
      };
      *reinterpret_cast<uint4*>(to.row(batch, head, col + j) + key) = {four(0), four(2), four(4),
                                                                       four(6)};
    }
  }
}

extern "C" __global__ __launch_bounds__(threads) void arrange_e4m3(
    Tensor<const E4m3> Q, Tensor<const E4m3> K, Tensor<const E4m3> V, Tensor<unsigned char> Q8,
    Tensor<unsigned char> K8, Tensor<unsigned char> V8, float* Q_scale, float* K_scale,
    float* V_scale, int M, int N, int heads, int kv_heads, int batch,
    const __grid_constant__ Mods mods) {
  const int of_Q = cdiv(M, Br) * heads * batch, of_K = cdiv(N, Bc) * kv_heads * batch;
  if (blockIdx.x < of_Q) {
    const int index = blockIdx.x;
    const auto [tile, head, of_batch] = place(index, cdiv(M, Br), heads);
    const Change change(descales_of(mods, of_batch, head / (heads / kv_heads)).q);
    copy_rows<Br, d>(Q, Q8, of_batch, head, tile * Br, M, change);
    if (threadIdx.x == 0) Q_scale[index] = change.scale;
  } else if (blockIdx.x < of_Q + of_K) {
    const int index = blockIdx.x - of_Q;
    const auto [tile, head, of_batch] = place(index, cdiv(N, Bc), kv_heads);
    const Change change(descales_of(mods, of_batch, head).k);
    copy_rows<Bc, d>(K, K8, of_batch, head, tile * Bc, N, change);
    if (threadIdx.x == 0) K_scale[index] = change.scale;
  } else {
    const int index = blockIdx.x - of_Q - of_K;
    const auto [tile, head, of_batch] = place(index, cdiv(N, Bc), kv_heads);
    const Change change(descales_of(mods, of_batch, head).v);
    transpose_values(V, V8, of_batch, head, tile * Bc, N, change);
    if (threadIdx.x == 0) V_scale[index] = change.scale;
  }
}
