#pragma once
// Tensor-core products of one warp: 16-bit inputs, float accumulators. All 32 lanes call each
// function together. With r = l / 4 and c = 2 * (l % 4), lane l holds:
//
//   A [16][16]  a[0] = A[r][c, c+1], a[1] = A[r+8][c, c+1], a[2], a[3] = columns + 8
//   B [16][8]   b0 = B[c, c+1][r], b1 = B[c+8, c+9][r]
//   D [16][8]   d[0], d[1] = D[r][c, c+1]; d[2], d[3] = D[r+8][c, c+1]
//
// Two neighbouring D fragments, packed in pairs, form an A fragment: P stays in registers.
#include <ptx/pack.cuh>

namespace simulator {

template <class T>
inline float widen(unsigned bits) {
  if constexpr (is_half<T>) {
    return half_value(static_cast<unsigned short>(bits));
  } else {
    return bfloat16_value(static_cast<unsigned short>(bits));
  }
}

inline void check_whole_warp(const char* text, Here here) {
  if (simulator_lanes() != 0xffffffffu) fault(text, here);
}

// Reads pairs without instrumentation by the compiler: check_read() checks each read and names the
// call in its report. Values passed by lanes need no check.
__attribute__((no_sanitize("thread"), noinline)) inline void read_pairs(unsigned* r,
                                                                        const void* const* rows,
                                                                        Here here) {
  for (int i = 0; i < 4; ++i) {
    const unsigned* pair = static_cast<const unsigned*>(rows[8 * i + lane() / 4]) + lane() % 4;
    check_read(pair, sizeof *pair, here);
    r[i] = *pair;
  }
}

__attribute__((no_sanitize("thread"), noinline)) inline void read_columns(unsigned* r,
                                                                          const void* const* rows,
                                                                          Here here) {
  for (int i = 0; i < 8; ++i) {
    const void* row = rows[i / 2 * 8 + 2 * (lane() % 4) + i % 2];
    const unsigned short* element = static_cast<const unsigned short*>(row) + lane() / 4;
    check_read(element, sizeof *element, here);
    r[i / 2] = i % 2 == 0 ? *element : r[i / 2] | static_cast<unsigned>(*element) << 16;
  }
}

inline const void* const* gather_rows(const void* row, const char* operation, Here here) {
  check_whole_warp("loads matrices in a warp of less than 32 threads", here);
  if (reinterpret_cast<size_t>(row) % 16 != 0) {
    fault("loads a row of a matrix that does not begin at a multiple of 16 bytes", here);
  }
  if (!is_shared(row)) fault("loads a row of a matrix that is not in shared memory", here);
  return warp_gather(row, operation, here);
}

// A lane's elements of A and B as floats, which represent every 16-bit number exactly.
struct Operands {
  float upper[4];  // A[r][c, c+1, c+8, c+9]
  float lower[4];  // the same columns of A[r+8]
  float b[4];      // B[c, c+1, c+8, c+9][r]
};

template <class T>
inline void widen_pair(float* to, unsigned pair) {
  to[0] = widen<T>(pair & 0xffff);
  to[1] = widen<T>(pair >> 16);
}

template <class T>
__attribute__((no_sanitize("thread"), noinline)) inline Operands widen_operands(const unsigned* a,
                                                                                unsigned b0,
                                                                                unsigned b1) {
  Operands mine;
  widen_pair<T>(mine.upper, a[0]);
  widen_pair<T>(mine.lower, a[1]);
  widen_pair<T>(mine.upper + 2, a[2]);
  widen_pair<T>(mine.lower + 2, a[3]);
  widen_pair<T>(mine.b, b0);
  widen_pair<T>(mine.b + 2, b1);
  return mine;
}

// Not instrumented: reads only values that lanes have passed.
__attribute__((no_sanitize("thread"), noinline)) inline void multiply_operands(
    float* d, const Operands* all) {
  const Operands* row = all + lane() / 4 * 4;
  const Operands* left = all + lane() % 4 * 8;
  const Operands* right = left + 4;
  float d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
  for (int half = 0; half < 4; half += 2) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = half; i < half + 2; ++i) {
        d0 += row[quarter].upper[i] * left[quarter].b[i];
        d1 += row[quarter].upper[i] * right[quarter].b[i];
        d2 += row[quarter].lower[i] * left[quarter].b[i];
        d3 += row[quarter].lower[i] * right[quarter].b[i];
      }
    }
  }
  d[0] = d0, d[1] = d1, d[2] = d2, d[3] = d3;
}

}  // namespace simulator

// A shared-memory address that supports arithmetic.
struct SharedAddress {
  unsigned long bytes;
  inline SharedAddress(const void* shared) : bytes(reinterpret_cast<unsigned long>(shared)) {}
  const void* pointer() const { return reinterpret_cast<const void*>(bytes); }
};

// Loads four 8x8 matrices of 16-bit numbers. Lane l passes the address of row l % 8 of matrix l /
// 8, a multiple of 16 bytes, and receives elements 2 * (l % 4) and 2 * (l % 4) + 1 of row l / 4 of
// each matrix. (As floats the matrices are 8x4, and the lane receives element l % 4 of row l / 4.)
inline void ldmatrix(unsigned (&r)[4], SharedAddress row, simulator::Here here = {}) {
  simulator::read_pairs(r, simulator::gather_rows(row.pointer(), "ldmatrix", here), here);
}

// Loads four transposed matrices.
inline void ldmatrix_trans(unsigned (&r)[4], SharedAddress row, simulator::Here here = {}) {
  simulator::read_columns(r, simulator::gather_rows(row.pointer(), "ldmatrix_trans", here), here);
}

// Computes D += A B.
template <class T>
inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                         simulator::Here here = {}) {
  simulator::check_whole_warp("multiplies matrices in a warp of less than 32 threads", here);
  simulator::Operands mine = simulator::widen_operands<T>(a, b0, b1);
  simulator::multiply_operands(d, simulator::warp_gather(mine, "multiply_add", here));
}
