#pragma once
// How the last of several blocks learns that it is the last.

// Counts a block's arrival: from 0 to `count` - 1, and then 0 again. Returns how many came before.
// What this thread has written or seen, through barriers also from others of its block, is seen by
// those that arrive later.  atom.acq_rel.gpu.global.inc.u32
__device__ __forceinline__ int arrive(unsigned* arrived, int count) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(arrived)), "r"(count - 1)
               : "memory");
  return int(before);
}
