#pragma once
#include <ptx/wgmma.cuh>

// Waits like the function in wgmma.cuh, but D must not be read yet. Operands of complete groups may
// be overwritten.
template <int pending>
inline void wgmma_wait_group(simulator::Here here = {}) {
  static_assert(pending >= 0, "a number of groups");
  const timeline::Phase waiting(timeline::product_wait, pending);
  simulator_wait_for_products(pending, nullptr, here.file, here.line);
}
