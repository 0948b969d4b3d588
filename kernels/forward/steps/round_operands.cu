// round_operands: rounds float32 inputs to the 16-bit type of a kernel's products.
//
// A separate launch reads each input once and writes half as many bytes; the kernel then reads
// 16-bit numbers, as for other dtypes. Rows are padded with zeros to a multiple of 8 numbers, so
// that they are aligned to 16 bytes. In float16, numbers above 65504 become infinite.
//
//   Q [batch, heads, M, d]    K, V [batch, kv_heads, N, d | dv]    Q16, K16, V16 the same, padded
//   grid (cdiv(M, Br) * heads * batch for Q, then cdiv(N, Br) * kv_heads * batch for K and V)
//   block (threads): Br rows, of which a thread rounds two neighbouring numbers at a time
//   the host sets: scalar, operand, Br, d, dv, threads, shared_bytes
#include <ptx/pack.cuh>
#include <tile/block_copy.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

static_assert(sizeof(operand) == 2, "two operands share a register");
static_assert(shared_bytes == 0, "uses no shared memory");

// Rounds Br rows of a head with `cols` columns.
template <int cols>
__device__ void round_rows(Tensor<const scalar> from, Tensor<operand> to, int batch, int head,
                           int first_row, int rows) {
  constexpr int pairs = cdiv(cols, 8) * 4;
  share_out<threads, Br * pairs, 8>([&](int i, int) {
    const int row = first_row + i / pairs, col = i % pairs * 2;
    if (row >= rows) return;
    const scalar* x = from.row(batch, head, row) + col;
    const scalar low = col < cols ? x[0] : 0.0f, high = col + 1 < cols ? x[1] : 0.0f;
    *reinterpret_cast<unsigned*>(to.row(batch, head, row) + col) = pack<operand>(low, high);
  });
}

extern "C" __global__ __launch_bounds__(threads) void round_operands(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<operand> Q16,
    Tensor<operand> K16, Tensor<operand> V16, int M, int N, int heads, int kv_heads, int batch) {
  const int index = blockIdx.x, blocks_of_Q = cdiv(M, Br) * heads * batch;
  if (index < blocks_of_Q) {
    const auto [tile, head, of_batch] = place(index, cdiv(M, Br), heads);
    round_rows<d>(Q, Q16, of_batch, head, tile * Br, M);
  } else {
    const auto [tile, head, of_batch] = place(index - blocks_of_Q, cdiv(N, Br), kv_heads);
    round_rows<d>(K, K16, of_batch, head, tile * Br, N);
    round_rows<dv>(V, V16, of_batch, head, tile * Br, N);
  }
}
