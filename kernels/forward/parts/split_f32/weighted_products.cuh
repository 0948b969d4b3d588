#pragma once
// Multiplies split weights by split operands, with another power of two for each row and tile.

#include <forward/parts/split_f32/split_products.cuh>

// O += weight * P V, with the rows of V from first_row on. Processes 16 columns at a time and
// accumulates each group from zero. If `ahead`, loads the fragments of V one step ahead.
template <bool ahead, int Bc, int width, int m, int n>
__device__ __forceinline__ void multiply_output(operand (&V)[2][Bc][width],
                                                const float (&P)[m][n][4],
                                                float (&O)[m][width / 8][4],
                                                const float (&weight)[m][2], int lane,
                                                int first_row = 0) {
  const timeline::Phase phase(timeline::products);
  unsigned high[n / 2][m][4], low[n / 2][m][4];
#pragma unroll
  for (int i = 0; i < n / 2 * m * 4; ++i) {
    const int k = i / (4 * m), row = i / 4 % m;
    const float (&p)[4] = P[row][2 * k + i % 4 / 2];
    split_pair<operand>(p[i % 2 * 2], p[i % 2 * 2 + 1], high[k][row][i % 4], low[k][row][i % 4]);
  }
  const ChunkAddresses values(V[0], first_row + lane % 16, lane / 16);
  unsigned b_high[2][4], b_low[2][4];  // fragments of this step and of the next one
  const auto load = [&](int i) {
    const int j = i / (n / 2), k = i % (n / 2);
    ldmatrix_trans(b_high[i % 2], values(k * step, 2 * j));
    ldmatrix_trans(b_low[i % 2], values(Bc + k * step, 2 * j));
  };
  if (ahead) load(0);
#pragma unroll
  for (int j = 0; j < width / step; ++j) {
    float sums[m][2][4] = {};
    LowSums<m, 2, false> C;
#pragma unroll
    for (int k = 0; k < n / 2; ++k) {
      const int i = j * (n / 2) + k;
      if (i + ahead < width / step * (n / 2)) load(i + ahead);
      multiply_split(sums, C, 0, high[k], low[k], b_high[i % 2], b_low[i % 2]);
    }
#pragma unroll
    for (int i = 0; i < m * 8; ++i) {
      const int row = i / 8, half = i / 4 % 2, e = i % 4;
      float& o = O[row][2 * j + half][e];
      o = fmaf(fmaf(C(row, half, e), low_unit, sums[row][half][e]), weight[row][e / 2], o);
    }
  }
}
