#pragma once
// Programmatic dependent launch: a launch whose record says `begins_early` may begin while the one
// before it ends. Elsewhere, and before Hopper, these do nothing.
#include <ptx/arch.cuh>

// Waits until the launch before has ended, and sees all that it wrote. A thread calls this before
// it reads what earlier launches write, or writes what they read or write. One thread of each block
// must call it, with `unawaited` arrays of one block: this launch then ends after those before it.
// griddepcontrol.wait
__device__ __forceinline__ void wait_for_launch_before() {
  if constexpr (on_hopper) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next launch may begin when all blocks have called this or ended. Its blocks use the free
// resources of multiprocessors.  griddepcontrol.launch_dependents
__device__ __forceinline__ void launch_dependents() {
  if constexpr (on_hopper) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
