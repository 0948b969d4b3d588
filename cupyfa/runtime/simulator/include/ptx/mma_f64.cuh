#pragma once
// Tensor-core products of one warp on doubles, 16x8x16. All 32 lanes call this together. With r = l
// / 4 and c = l % 4, lane l holds:
//
//   A [16][16]  a[2 * i], a[2 * i + 1] = A[r, r+8][c + 4 * i]
//   B [16][8]   b[i] = B[c + 4 * i][r]
//   D [16][8]   d[0], d[1] = D[r][2 * c, 2 * c + 1]; d[2], d[3] = the same columns of D[r+8]
#include <ptx/mma.cuh>

namespace simulator {

struct DoubleOperands {
  double a[8], b[4];
};

// Accumulates each element by fused multiply-adds in order of k.
__attribute__((no_sanitize("thread"), noinline)) inline void multiply_operands(
    double* d, const DoubleOperands* all) {
  const DoubleOperands* row = all + lane() / 4 * 4;
  const DoubleOperands* column = all + lane() % 4 * 8;
  for (int e = 0; e < 4; ++e) {
    double sum = d[e];
    for (int k = 0; k < 16; ++k)
      sum = fma(row[k % 4].a[k / 4 * 2 + e / 2], column[e % 2 * 4 + k % 4].b[k / 4], sum);
    d[e] = sum;
  }
}

__attribute__((no_sanitize("thread"), noinline)) inline DoubleOperands both_operands(
    const double* a, const double* b) {
  DoubleOperands mine;
  for (int i = 0; i < 8; ++i) mine.a[i] = a[i];
  for (int i = 0; i < 4; ++i) mine.b[i] = b[i];
  return mine;
}

}  // namespace simulator

// Computes D += A B.
inline void multiply_add_f64(double (&d)[4], const double (&a)[8], const double (&b)[4],
                             simulator::Here here = {}) {
  simulator::check_whole_warp("multiplies matrices in a warp of less than 32 threads", here);
  simulator::DoubleOperands mine = simulator::both_operands(a, b);
  simulator::multiply_operands(d, simulator::warp_gather(mine, "multiply_add_f64", here));
}
