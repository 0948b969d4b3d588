#pragma once
// Calls a body that is rarely needed, so that the kernel's loop keeps the registers it would take.
template <class Body>
__device__ __noinline__ void call_cold_path(const Body& body) {
  body();
}
