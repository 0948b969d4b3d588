#pragma once
// Calls a rarely needed body out of line, so that it takes no registers of the main loop.
template <class Body>
__device__ __noinline__ void call_cold_path(const Body& body) {
  body();
}
