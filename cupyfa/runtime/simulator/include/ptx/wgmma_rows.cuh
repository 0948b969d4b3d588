#pragma once
// Products like those of wgmma.cuh, with A in registers and B by_rows.
#include <ptx/wgmma.cuh>

template <class T, int count>
inline void multiply_rows(float (&d)[count], const unsigned (&a)[4], Matrix b, bool added,
                          simulator::Here here = {}) {
  simulator::check_columns<2 * count>();
  if (b.rows != 0) simulator::fault("multiplies rows of B by_columns", here);
  simulator_multiply(d, a, nullptr, b.address, 0, 2 * count, simulator::format<T>, added, here.file,
                     here.line);
}
