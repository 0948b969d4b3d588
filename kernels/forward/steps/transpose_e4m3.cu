// transpose_e4m3: transposes V in e4m3 for wgmma_fp8; `quantise` transposes V of other dtypes.
//
// wgmma requires e4m3 operands that are contiguous along the summed dimension, for V along the
// keys. Within each 32 keys, the order is that in which a thread of wgmma_fp8 holds their P.
//
//   V [batch, kv_heads, N, dv]    V8 [batch, kv_heads, dv, N32], N padded to N32 with zeros
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (threads): a tile
//   the host sets: Bc, dv, threads, shared_bytes
#include <ptx/dependent_launch.cuh>
#include <ptx/e4m3.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "uses no shared memory");
static_assert(Bc % 32 == 0, "keys are permuted within groups of 32");

// Loads four elements of a row, zeros past its end. The first is in the lowest bits.
__device__ __forceinline__ unsigned load_four(const E4m3* row, int col, bool aligned) {
  if (aligned && col + 4 <= dv) return *reinterpret_cast<const unsigned*>(row + col);
  unsigned four = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (col + j < dv) four |= unsigned(row[col + j].bits) << j * 8;
  }
  return four;
}

__device__ __forceinline__ unsigned byte_of(unsigned four, int j) {
  return four >> j * 8 & 0xff;
}

extern "C" __global__ __launch_bounds__(threads) void transpose_e4m3(Tensor<const E4m3> V,
                                                                     Tensor<unsigned char> V8,
                                                                     int N, int kv_heads) {
  launch_dependents();
  const auto [tile, head, of_batch] = place(blockIdx.x, max(cdiv(N, Bc), 1), kv_heads);
  constexpr int in_row = cdiv(dv, 4);
  const bool aligned = is_aligned(V);
  // Each thread transposes 16 keys of four columns; two neighbouring threads handle 32 keys.
  for (int i = threadIdx.x; i < Bc / 16 * in_row; i += threads) {
    const int key = tile * Bc + i / 2 / in_row * 32 + i % 2 * 16, col = i / 2 % in_row * 4;
    if (key / 32 * 32 >= N) return;  // rows of V8 end at a multiple of 32 keys
    unsigned rows[16];
#pragma unroll
    for (int k = 0; k < 16; ++k)
      rows[k] = key + k < N ? load_four(V.row(of_batch, head, key + k), col, aligned) : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (col + j >= dv) break;
      const auto four = [&](int k) {
        return byte_of(rows[k], j) | byte_of(rows[k + 1], j) << 8 | byte_of(rows[k + 8], j) << 16 |
               byte_of(rows[k + 9], j) << 24;
      };
      *reinterpret_cast<uint4*>(V8.row(of_batch, head, col + j) + key) = {four(0), four(2), four(4),
                                                                          four(6)};
    }
  }
}
