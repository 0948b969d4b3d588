// mma_two_pass_columns: `mma_columns` without dQ, which another pass sums.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (32 * warps)
//   the host sets: scalar, operand, real, Br, Bc, warps, stages, d, dv, causal, windowed, threads,
//   shared_bytes; Wr and pack_gqa for row_state.cuh
#include <backward/parts/gradient_columns.cuh>

extern "C" __global__ __launch_bounds__(threads, 1) void mma_two_pass_columns(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, Tensor<scalar> dK,
    Tensor<scalar> dV, int M, int N, int kv_heads, int group, int causal_offset, int window_offset,
    real scale) {
  sum_columns<false>(Q, K, V, dO, lse, delta, nullptr, dK, dV, M, N, kv_heads, group, causal_offset,
                     window_offset, scale);
}
