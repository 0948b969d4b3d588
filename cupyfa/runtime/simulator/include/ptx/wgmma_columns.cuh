#pragma once
// Products like those of wgmma.cuh, with A by_rows and B by_columns.
#include <ptx/wgmma.cuh>

template <class T, int count>
inline void multiply_columns(float (&d)[count], Matrix a, Matrix b, bool added,
                             simulator::Here here = {}) {
  simulator::check_columns<2 * count>();
  if (a.rows != 0) simulator::fault("multiplies A by_columns", here);
  if (b.rows == 0) simulator::fault("multiplies columns of B by_rows", here);
  simulator_multiply(d, nullptr, a.address, b.address, b.rows, 2 * count, simulator::format<T>,
                     added, here.file, here.line);
}
