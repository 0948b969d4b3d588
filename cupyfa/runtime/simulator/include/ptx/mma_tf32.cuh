#pragma once
// Tensor-core products of one warp on tf32: floats whose last 13 bits are ignored. A product is
// 16x8x8; D has the layout of mma.cuh. With r = l / 4 and c = l % 4, lane l holds:
//
//   A [16][8]   a[0] = A[r][c], a[1] = A[r+8][c], a[2], a[3] = column c + 4
//   B [8][8]    b0 = B[c][r], b1 = B[c+4][r]
#include <ptx/mma.cuh>

namespace simulator {

// A lane's elements of A and B as floats without the ignored bits.
struct Tf32Operands {
  float upper[2];  // A[r][c, c+4]
  float lower[2];  // the same columns of A[r+8]
  float b[2];      // B[c, c+4][r]
};

inline float cut_to_tf32(unsigned bits) {
  return __uint_as_float(bits & 0xffffe000u);
}

__attribute__((no_sanitize("thread"), noinline)) inline Tf32Operands cut_operands(const unsigned* a,
                                                                                  unsigned b0,
                                                                                  unsigned b1) {
  return {{cut_to_tf32(a[0]), cut_to_tf32(a[2])},
          {cut_to_tf32(a[1]), cut_to_tf32(a[3])},
          {cut_to_tf32(b0), cut_to_tf32(b1)}};
}

__attribute__((no_sanitize("thread"), noinline)) inline void multiply_operands(
    float* d, const Tf32Operands* all) {
  const Tf32Operands* row = all + lane() / 4 * 4;
  const Tf32Operands* left = all + lane() % 4 * 8;
  const Tf32Operands* right = left + 4;
  float d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
  for (int half = 0; half < 2; ++half) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      d0 += row[quarter].upper[half] * left[quarter].b[half];
      d1 += row[quarter].upper[half] * right[quarter].b[half];
      d2 += row[quarter].lower[half] * left[quarter].b[half];
      d3 += row[quarter].lower[half] * right[quarter].b[half];
    }
  }
  d[0] = d0, d[1] = d1, d[2] = d2, d[3] = d3;
}

}  // namespace simulator

// Rounds x to tf32, to nearest, ties away from zero.
inline unsigned round_to_tf32(float x) {
  if (x != x) return 0x7fffffff;
  return (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
}

// Computes D += A B.
inline void multiply_add_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                              simulator::Here here = {}) {
  simulator::check_whole_warp("multiplies matrices in a warp of less than 32 threads", here);
  simulator::Tf32Operands mine = simulator::cut_operands(a, b0, b1);
  simulator::multiply_operands(d, simulator::warp_gather(mine, "multiply_add_tf32", here));
}
