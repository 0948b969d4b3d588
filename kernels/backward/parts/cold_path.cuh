#pragma once
// Calls a rarely executed body out of line, so that it occupies no registers in the main loop.
template <class Body>
__device__ __noinline__ void call_cold_path(const Body& body) {
  body();
}
