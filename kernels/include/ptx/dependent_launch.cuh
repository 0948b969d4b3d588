#pragma once
// Programmatic dependent launch: a launch with `begins_early` in its record may start while the
// previous launch finishes. For other launches, and before Hopper, these functions do nothing.
#include <ptx/arch.cuh>

// Waits until the previous launch has ended; all of its writes are then visible. Threads call this
// before they read what earlier launches write, or write what they use; with `awaits_all`, before
// all accesses. At least one thread of each block calls it; with `unawaited`, one of the launch.
__device__ __forceinline__ void wait_for_launch_before() {
  if constexpr (on_hopper) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next launch start, on what is free on SMs, once all blocks have called this or ended.
__device__ __forceinline__ void launch_dependents() {
  if constexpr (on_hopper) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
