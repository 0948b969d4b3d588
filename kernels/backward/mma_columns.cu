// mma_columns: `columns` on tensor cores, Q and dO brought by copies that go on meanwhile.
//
// A block's eight warps share out each of the five products of a step so that little of shared
// memory is read. P and dS pass through it as 16-bit numbers, since other warps need them, and
// transposed. dK and dV stay in registers. What a step knows of dQ is added to sums in memory, in
// the order of the registers, four at once on sm_90.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]    dQ_sum: the tiles of rows, as red.cuh has them
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (32 * warps)
//   the host sets: scalar, operand, real, Br, Bc, warps, stages, d, dv, causal, windowed, threads,
//   shared_bytes; Wr and pack_gqa for row_state.cuh
#include <backward/parts/gradient_columns.cuh>

extern "C" __global__ __launch_bounds__(threads, 1) void mma_columns(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, float* dQ_sum,
    Tensor<scalar> dK, Tensor<scalar> dV, int M, int N, int kv_heads, int group, int causal_offset,
    int window_offset, real scale) {
  sum_columns<true>(Q, K, V, dO, lse, delta, dQ_sum, dK, dV, M, N, kv_heads, group, causal_offset,
                    window_offset, scale);
}
