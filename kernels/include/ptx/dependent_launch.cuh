#pragma once
// Programmatic dependent launch: a launch with `begins_early` in its record may start while the
// previous launch finishes. For other launches, and before Hopper, these functions do nothing.
#include <ptx/arch.cuh>

// Waits until the previous launch has ended; all of its writes are then visible. A thread calls
// this before it reads what earlier launches write, or writes what they use; with `awaits_all`,
// before all accesses. At least one thread of each block calls it; with `unawaited`, one thread of
// the launch is enough. It then cannot end before the previous one.  PTX: griddepcontrol.wait
__device__ __forceinline__ void wait_for_launch_before() {
  if constexpr (on_hopper) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Allows the next launch to start once all blocks have called this or ended. Its blocks use free SM
// resources.  PTX: griddepcontrol.launch_dependents
__device__ __forceinline__ void launch_dependents() {
  if constexpr (on_hopper) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
