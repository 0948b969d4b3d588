#pragma once
// Products of a warp's rows with 16-bit tiles in shared memory, and the store of O. All sizes are
// deduced from the arguments; m counts fragments of 16 rows, n fragments of 8 columns.

#include <attention/row_softmax.cuh>
#include <forward/parts/multiply_fragments.cuh>
#include <ptx/mma.cuh>
#include <tile/chunk_addresses.cuh>
#include <timeline.cuh>

static_assert(sizeof(operand) == 2, "these tensor-core products take 16-bit numbers");

// S = Q K^T for the warp's rows and the tile's keys.
template <int Br, int columns, int Bc, int depth, int m, int n>
__device__ __forceinline__ void multiply_scores(operand (&Q)[Br][columns], operand (&K)[Bc][depth],
                                                float (&S)[m][n][4], int first_row, int lane) {
  const timeline::Phase phase(timeline::products);
  const ChunkAddresses queries(Q, first_row + lane % 16, lane / 16);
  const auto keys = [&](int row, int chunk) {
    const int own_row = lane / 16 * 8 + lane % 8, own_chunk = lane / 8 % 2;
    if constexpr (depth > 128) return ChunkAddresses(K, own_row, own_chunk)(row, chunk);
    return SharedAddress(at(K, row + own_row, chunk + own_chunk));  // saves registers
  };
#pragma unroll
  for (int k = 0; k < depth / step; ++k) {
    unsigned a[m][4];
#pragma unroll
    for (int i = 0; i < m; ++i) ldmatrix(a[i], queries(i * step, 2 * k));
    multiply_fragments<operand>(
        S, a, [&](unsigned (&b)[4], int j) { ldmatrix(b, keys(j * step, 2 * k)); });
  }
}

// Computes P = exp(S - maximum) and O += P V. Two adjacent fragments of P, 16 keys, form one
// operand, which is computed right before its product, so that the exponentials of some keys
// overlap with the products of others.
template <int Bc, int width, int m, int keys, int cols, int pack_gqa>
__device__ __forceinline__ void multiply_output(operand (&V)[Bc][width], float (&S)[m][keys][4],
                                                float (&O)[m][cols][4],
                                                Rows<m * step, pack_gqa>& rows, int first_key,
                                                int lane) {
  const timeline::Phase phase(timeline::products);
  const auto values = [&](int row, int chunk) {
    if constexpr (width > 128) return ChunkAddresses(V, lane % 16, lane / 16)(row, chunk);
    return SharedAddress(at(V, row + lane % 16, chunk + lane / 16));  // saves registers
  };
  float sum[m][2] = {};
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    exponentiate(S, 2 * k, rows, sum);
    exponentiate(S, 2 * k + 1, rows, sum);
    for_dropped(S, k, k + 1, rows, first_key, [&](int i, int j, int e) { S[i][j][e] = 0; });
    unsigned a[m][4];
#pragma unroll
    for (int i = 0; i < m * 4; ++i) {
      const float (&p)[4] = S[i / 4][2 * k + i % 4 / 2];
      a[i / 4][i % 4] = pack<operand>(p[i % 2 * 2], p[i % 2 * 2 + 1]);
    }
    multiply_fragments<operand>(
        O, a, [&](unsigned (&b)[4], int n) { ldmatrix_trans(b, values(k * step, 2 * n)); });
  }
  rows.add(sum);
}

// Stores `cols` columns of the warp's rows of O through the shared memory of Q, so that
// neighbouring lanes store neighbouring chunks of 16 bytes. O has the type of the operands.
template <int cols, int pack_gqa, int Br, int columns, int m, int n>
__device__ void store_output(operand (&Q)[Br][columns], const float (&O)[m][n][4],
                             Tensor<result> out, int batch, int head, int first_row, int M,
                             int own_row, int lane) {
  const timeline::Phase phase(timeline::epilogue);
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      operand* to = at(Q, own_row + i * 8 + lane / 4, j) + 2 * (lane % 4);
      *reinterpret_cast<unsigned*>(to) =
          pack<operand>(O[i / 2][j][i % 2 * 2], O[i / 2][j][i % 2 * 2 + 1]);
    }
  }
  __syncwarp();
  const bool aligned = is_aligned(out);
#pragma unroll 4
  for (int i = lane; i < m * step * n; i += warp_size) {
    const int row = i / n, chunk = i % n, count = min(in_chunk, cols - chunk * in_chunk);
    const int packed_row = first_row + own_row + row;
    if (packed_row >= M * pack_gqa) continue;
    const operand* from = at(Q, own_row + row, chunk);
    result* to = out.row(batch, head * pack_gqa + packed_row % pack_gqa, packed_row / pack_gqa) +
                 chunk * in_chunk;
    if (aligned && count == in_chunk) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < count; ++j) to[j] = from[j];
    }
  }
}
