#pragma once
// 16x16x16 tensor-core products of one warp: half in, float out. All 32 lanes call each function.
//
// In the simulator lane l holds half a row of a tile: row l / 2, from column 8 * (l % 2) on.
#include <cuda_fp16.h>

namespace simulator {

constexpr int tile_side = 16;
constexpr int lane_elements = 8;

inline int tile_row() {
  return lane() / 2;
}
inline int tile_column() {
  return lane() % 2 * lane_elements;
}

// A lane's elements of a tile as floats, which represent every half exactly.
struct TilePart {
  float r[lane_elements];
};

inline void check_tile(const void* tile, int stride, size_t element, const char* text) {
  bool aligned = reinterpret_cast<size_t>(tile) % 32 == 0;
  if (!aligned || stride * element % 16 != 0) fault(text);
}

// Loads a tile as the instruction does: all lanes synchronise, then each lane reads its elements.
inline TilePart load_tile(const __half* tile, int stride, bool transposed, const char* operation,
                          Here here) {
  check_tile(tile, stride, sizeof(__half),
             "loads a tensor-core tile that does not begin at a multiple of 32 bytes, or whose"
             " stride is not a multiple of 8 halves");
  simulator_ballot(0xffffffffu, false, operation, here.file, here.line);
  TilePart part;
  for (int i = 0; i < lane_elements; ++i) {
    int row = transposed ? tile_column() + i : tile_row();
    int column = transposed ? tile_row() : tile_column() + i;
    part.r[i] = __half2float(tile[row * stride + column]);
  }
  return part;
}

// Not instrumented: reads only values that lanes have passed.
__attribute__((no_sanitize("thread"), noinline)) inline void multiply_parts(float* d,
                                                                            const float* a_row,
                                                                            const TilePart* b) {
  for (int k = 0; k < tile_side; ++k) {
    const TilePart& b_part = b[2 * k + lane() % 2];
    for (int i = 0; i < lane_elements; ++i) d[i] += a_row[k] * b_part.r[i];
  }
}

}  // namespace simulator

struct MatrixA {
  simulator::TilePart part;
};
struct MatrixBRows {
  simulator::TilePart part;
};
struct MatrixBColumns {
  simulator::TilePart part;
};

// Zero-initialised by `Accumulator d{}`.
struct Accumulator {
  float r[8];
};

// Loads A[m][k] = tile[m * stride + k].
inline MatrixA load_a(const __half* tile, int stride, simulator::Here here = {}) {
  return {simulator::load_tile(tile, stride, false, "load_a", here)};
}

// Loads B[k][n] = tile[k * stride + n].
inline MatrixBRows load_b_rows(const __half* tile, int stride, simulator::Here here = {}) {
  return {simulator::load_tile(tile, stride, false, "load_b_rows", here)};
}

// Loads B[k][n] = tile[n * stride + k]: a row-major tile, transposed.
inline MatrixBColumns load_b_columns(const __half* tile, int stride, simulator::Here here = {}) {
  return {simulator::load_tile(tile, stride, true, "load_b_columns", here)};
}

namespace simulator {

inline void multiply_tiles(Accumulator& d, const TilePart& a, const TilePart& b, Here here) {
  float a_row[tile_side];
  const TilePart* all = warp_gather(a, "multiply_add", here);
  for (int k = 0; k < tile_side; ++k) {
    a_row[k] = all[2 * tile_row() + k / lane_elements].r[k % lane_elements];
  }
  multiply_parts(d.r, a_row, warp_gather(b, "multiply_add", here));
}

}  // namespace simulator

inline void multiply_add(Accumulator& d, const MatrixA& a, const MatrixBRows& b,
                         simulator::Here here = {}) {
  simulator::multiply_tiles(d, a.part, b.part, here);
}
inline void multiply_add(Accumulator& d, const MatrixA& a, const MatrixBColumns& b,
                         simulator::Here here = {}) {
  simulator::multiply_tiles(d, a.part, b.part, here);
}

// Stores D: tile[m * stride + n] = D[m][n].
inline void store(float* tile, int stride, const Accumulator& d, simulator::Here here = {}) {
  simulator::check_tile(tile, stride, sizeof(float),
                        "stores a tensor-core tile that does not begin at a multiple of 32 bytes,"
                        " or whose stride is not a multiple of 4 floats");
  simulator_ballot(0xffffffffu, false, "store", here.file, here.line);
  for (int i = 0; i < simulator::lane_elements; ++i) {
    tile[simulator::tile_row() * stride + simulator::tile_column() + i] = d.r[i];
  }
}
