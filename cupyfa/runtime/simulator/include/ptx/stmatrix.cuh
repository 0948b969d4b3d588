#pragma once
// Stores 8x8 matrices of 16-bit numbers from the registers of one warp.
#include <ptx/mma.cuh>

namespace simulator {

struct Registers {
  unsigned r[4];
};

// Each lane writes the pair that ldmatrix would return to it.
__attribute__((no_sanitize("thread"), noinline)) inline void write_columns(void* const* rows,
                                                                           const Registers* all,
                                                                           Here here) {
  for (int i = 0; i < 4; ++i) {
    int row = lane() / 4, column = 2 * (lane() % 4);
    unsigned low = all[4 * column + row / 2].r[i], high = all[4 * column + 4 + row / 2].r[i];
    unsigned* pair = static_cast<unsigned*>(rows[8 * i + row]) + lane() % 4;
    check_write(pair, sizeof *pair, here);
    *pair = (low >> row % 2 * 16 & 0xffff) | (high >> row % 2 * 16) << 16;
  }
}

}  // namespace simulator

// Stores four matrices to shared memory and transposes each. Lane l passes the address of row l % 8
// of stored matrix l / 8, and elements [2 * (l % 4)][l / 4] and [2 * (l % 4) + 1][l / 4] of each.
inline void store_matrices_transposed(void* row, const unsigned (&r)[4],
                                      simulator::Here here = {}) {
  const char* name = "store_matrices_transposed";
  simulator::Registers mine = {{r[0], r[1], r[2], r[3]}};
  void* rows[32];
  auto all_rows = simulator::gather_rows(row, name, here);
  for (int i = 0; i < 32; ++i) rows[i] = const_cast<void*>(all_rows[i]);
  simulator::write_columns(rows, simulator::warp_gather(mine, name, here), here);
}
